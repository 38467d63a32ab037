"""Pools of programs that end in every way: no reward process outlives them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest
from rewards.pool_helpers import PATIENCE_S, is_gone, wait_until

PARENT = """
import asyncio, sys, threading, time
import numpy as np
from jaxrl.rewards.pool import RewardPool
from jaxrl.types import Completion

def reward(completion, reference):
    print("printed by the reward")
    while completion.text == "hang":
        time.sleep(0.01)
    return 0.75

def said(text):
    zeros = np.zeros(1)
    return Completion(zeros, zeros, zeros, "stop", text)

if __name__ == "__main__":
    how = sys.argv[1]
    scorer = reward if len(sys.argv) == 2 else "rewards.bad_rewards:obey"
    pool = RewardPool(scorer, timeout_s=1.0 if how == "locked" else 600.0).start()
    print(*pool.pids, flush=True)
    if how == "score":
        print(asyncio.run(pool.score(said("x"), {})).value)
    elif how == "exit":
        # Neither closed nor finished: the interpreter ends with an item in progress.
        run = lambda: asyncio.run(pool.score(said("hang"), {}))
        threading.Thread(target=run, daemon=True).start()
        time.sleep(0.3)
    elif how == "idle":
        time.sleep(600)
    elif how == "busy":
        asyncio.run(pool.score(said("hang"), {}))
    else:
        asyncio.run(pool.score(said("hang in c"), {"file": sys.argv[2]}))
"""


def run_parent(tmp_path, *arguments):
    """A program with a pool of its own; gives the process and the ids of its reward processes."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    path = os.pathsep.join(p for p in sys.path if p)
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_pool_reward_of_the_main_program_works_and_keeps_standard_output_clean(tmp_path):
    process, pids = run_parent(tmp_path, "score")

    output, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 0
    assert output == "0.75\n"
    wait_until(lambda: all(map(is_gone, pids)))


def test_pool_left_open_at_interpreter_exit_leaves_no_process(tmp_path):
    process, pids = run_parent(tmp_path, "exit")

    assert process.wait(PATIENCE_S) == 0
    assert pids
    wait_until(lambda: all(map(is_gone, pids)))


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_pool_of_a_killed_parent_leaves_no_process(tmp_path, state):
    process, pids = run_parent(tmp_path, state)
    time.sleep(0.3)

    process.kill()
    process.wait(PATIENCE_S)

    assert pids
    wait_until(lambda: all(map(is_gone, pids)))


@pytest.mark.slow
def test_pool_of_a_killed_parent_ends_even_a_process_whose_interpreter_is_locked(tmp_path):
    file = tmp_path / "pid"
    process, pids = run_parent(tmp_path, "locked", str(file))
    wait_until(file.exists)

    process.kill()
    process.wait(PATIENCE_S)

    # Only the watchdog in C can end it, some seconds after the time limit.
    assert pids
    wait_until(lambda: all(map(is_gone, pids)))

"""The pool with real processes and rewards that misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from rewards.pool_helpers import LIMIT_S, PATIENCE_S, is_gone, linux, said, score, wait_until

from jaxrl.errors import ConfigError, RewardError
from jaxrl.rewards.pool import RewardPool


@pytest.fixture(scope="module")
def pool():
    """One process that does what the completion says; it is replaced as often as needed."""
    with RewardPool("rewards.bad_rewards:obey", workers=1, timeout_s=LIMIT_S) as pool:
        yield pool


def test_score_numbers_come_back_exactly(pool):
    results = score(pool, "one", "float32", "int")

    assert [(r.value, r.outcome, r.detail) for r in results] == [
        (1.0, "ok", ""),
        (0.25, "ok", ""),
        (3.0, "ok", ""),
    ]


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("nan", "returned nan; a reward must be finite"),
        ("inf", "returned -inf; a reward must be finite"),
        ("none", "returned None of type NoneType; a reward must be a number"),
        ("str", "returned '1.0' of type str"),
        ("bool", "returned True of type bool"),
        ("numpy bool", "of type bool"),
        ("array", "of type ndarray"),
        ("huge int", "which is no float: OverflowError"),
        ("fail", "ValueError: no digit\nin it (bad_rewards.py:"),
        ("fail unshowably", "Unshowable: <its message cannot be shown>"),
        ("exit", "SystemExit: 4"),
        ("interrupt", "KeyboardInterrupt"),
        ("recurse", "RecursionError"),
    ],
)
def test_score_what_is_no_finite_number_is_an_error_in_the_same_process(pool, text, detail):
    (before,) = score(pool, "pid")

    result, after = score(pool, text, "pid")

    assert (result.outcome, result.value) == ("error", None)
    assert detail in result.detail
    assert after == before


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("os exit", "it exited with status 3"),
        ("kill", "it was killed by SIGKILL (out of memory?)"),
        ("crash", "it was killed by SIGSEGV"),
        ("close everything", "it closed its channel"),
    ],
)
def test_score_process_that_dies_is_an_error_with_the_cause_and_is_replaced(pool, text, cause):
    result, after = score(pool, text, "one")

    assert (result.outcome, result.value) == ("error", None)
    assert cause in result.detail
    assert after.outcome == "ok"


@pytest.mark.parametrize("text", ["hang", "hang in c"])
def test_score_hanging_process_is_a_timeout_and_is_killed_and_replaced(pool, text):
    old = int(score(pool, "pid")[0].value)

    result, after = score(pool, text, "pid")

    assert (result.outcome, result.value) == ("timeout", None)
    assert "longer than the limit of 1 s" in result.detail
    assert after.outcome == "ok"
    assert after.value != old
    assert is_gone(old)


@linux
def test_score_hanging_process_takes_its_children_along(pool, tmp_path):
    file = tmp_path / "pid"

    score(pool, "hang with child", reference={"file": str(file)})

    if file.exists() and file.read_text():  # a slow start may have used up the limit
        wait_until(lambda: is_gone(int(file.read_text())))


def test_score_process_killed_while_idle_is_replaced_without_an_error(pool):
    pid = int(score(pool, "pid")[0].value)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid))

    (result,) = score(pool, "pid")

    assert result.outcome == "ok"
    assert result.value != pid


def test_score_time_limit_counts_from_the_start_of_an_item(pool):
    # Together they take twice the limit; each alone stays below it.
    results = score(pool, *["sleep a little"] * 10)

    assert {r.outcome for r in results} == {"ok"}


def test_score_output_of_a_reward_does_not_disturb_the_protocol(pool, capfd):
    results = score(pool, "flood", "one")

    assert [r.value for r in results] == [0.5, 1.0]
    captured = capfd.readouterr()
    assert captured.out == ""


def test_score_huge_texts_pass_in_full(pool):
    (result,) = score(pool, "answer length", reference={"answer": "é" * 5_000_000})

    assert result.value == 5_000_000


def test_score_unknown_action_is_an_error_with_the_key(pool):
    (result,) = score(pool, "x" * 3_000_000)

    assert result.outcome == "error"
    assert "KeyError" in result.detail
    assert len(result.detail) < 10_000


def test_score_reference_that_cannot_be_pickled_is_an_error(pool):
    result, after = score(pool, "one", "one", reference={"f": lambda: 0})

    assert "cannot be sent to a reward process" in result.detail
    assert after.outcome == "error"
    assert score(pool, "one")[0].outcome == "ok"


def test_reward_process_runs_in_a_main_thread_without_jax_and_off_the_accelerator(pool):
    results = score(pool, "main thread", "jax", "env")

    # The main thread matters: math-verify and others set alarms, which work nowhere else.
    assert [r.value for r in results] == [1.0, 0.0, 1.0]


def test_score_never_blocks_the_event_loop(pool):
    async def run():
        ticks = 0
        scoring = asyncio.ensure_future(pool.score(said("hang"), {}))
        while not scoring.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks, scoring.result().outcome

    ticks, outcome = asyncio.run(run())

    assert outcome == "timeout"
    assert ticks >= 5


def test_score_works_from_several_event_loops_at_once(pool):
    results = {}

    def run(name):
        results[name] = [r.value for r in score(pool, "one", "int", "float32")]

    threads = [threading.Thread(target=run, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert results == {name: [1.0, 3.0, 0.25] for name in range(4)}


def test_score_cancelled_item_that_has_not_started_is_dropped(pool):
    async def run():
        first = asyncio.ensure_future(pool.score(said("sleep a little"), {}))
        waiting = [asyncio.ensure_future(pool.score(said("os exit"), {})) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return await first, await pool.score(said("one"), {})

    errors = pool.counts["error"]

    first, last = asyncio.run(run())

    assert (first.outcome, last.outcome) == ("ok", "ok")
    assert pool.counts["error"] == errors


def test_counts_tell_the_outcomes_apart():
    with RewardPool("rewards.bad_rewards:obey", workers=2, timeout_s=LIMIT_S) as pool:
        score(pool, "one", "hang", "fail", "os exit", "int", "nan")

        assert pool.counts == {"ok": 2, "timeout": 1, "error": 3}
        wait_until(lambda: len(pool.pids) == 2)  # killed processes are replaced


def test_close_while_items_run_and_wait_ends_them_and_leaves_no_process():
    pool = RewardPool("rewards.bad_rewards:obey", timeout_s=600.0).start()
    pids = pool.pids

    async def run():
        tasks = [asyncio.ensure_future(pool.score(said(t), {})) for t in ["hang", "one", "hang"]]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(pool.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(run())

    assert [type(o) for o in outcomes] == [RewardError] * 3
    assert "closed" in str(outcomes[0])
    assert all(map(is_gone, pids))
    assert pool.pids == []
    pool.close()


def test_score_on_a_pool_that_does_not_run_raises():
    pool = RewardPool("exact")

    with pytest.raises(RewardError, match="not started"):
        score(pool, "one")
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        score(pool, "one")
    with pytest.raises(RewardError, match="closed"):
        pool.start()


def test_pool_that_nobody_keeps_ends_its_processes():
    pool = RewardPool("exact").start()
    pids = pool.pids

    del pool

    wait_until(lambda: all(map(is_gone, pids)))


def test_pool_function_defined_in_a_function_is_sent_by_value():
    bonus = 0.5

    def scorer(completion, reference):
        return len(completion.text) + bonus

    with RewardPool(scorer) as pool:
        assert score(pool, "abc")[0].value == 3.5


def test_pool_exact_scorer_by_name():
    with RewardPool("exact") as pool:
        results = score(pool, "olleh ", "hello", reference={"answer": "olleh"})

    assert [r.value for r in results] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scorer": "exat"}, "did you mean 'exact'"),
        ({"scorer": "exact", "workers": 0}, "workers=0 must be at least 1"),
        ({"scorer": "exact", "timeout_s": 0}, "timeout_s=0 and start_timeout_s=60.0"),
        ({"scorer": "exact", "timeout_s": float("nan")}, "timeout_s=nan"),
    ],
)
def test_pool_wrong_arguments_raise(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RewardPool(**arguments)


def test_pool_scorer_that_cannot_be_sent_raises():
    lock = threading.Lock()

    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        RewardPool(lambda completion, reference: float(lock.locked()))


class ImportsOnlyHere:
    """Can be pickled, but not read anywhere else."""

    def __call__(self, completion, reference):
        return 0.0

    def __reduce__(self):
        return (_import_missing, ())


def _import_missing():
    import jaxrl_no_such_module  # noqa: F401


def test_start_scorer_that_a_process_cannot_load_raises_with_the_cause():
    pool = RewardPool(ImportsOnlyHere())

    with pytest.raises(RewardError, match=r"cannot load the scorer: ModuleNotFoundError"):
        pool.start()

    assert pool.pids == []


def test_start_scorer_that_kills_its_process_at_import_raises(tmp_path, monkeypatch):
    (tmp_path / "deadly_rewards.py").write_text(
        "import os, sys\n"
        "if 'jaxrl.rewards.worker' in sys.modules: os._exit(7)\n"
        "def score(completion, reference): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(RewardError, match="ended while starting: it exited with status 7"):
        RewardPool("deadly_rewards:score").start()

"""Joining alone costs nothing; arguments that cannot be are refused before anything waits."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed.stores import controls

from jaxrl import distributed
from jaxrl.distributed import startup
from jaxrl.distributed.beats import process_state
from jaxrl.distributed.groups import Group, axes_of
from jaxrl.distributed.order import fingerprint
from jaxrl.distributed.processes import Processes
from jaxrl.distributed.record import read_programs
from jaxrl.distributed.sequence import Sequence
from jaxrl.distributed.versions import source_digest, versions
from jaxrl.distributed.watchdog import Watch, Watchdog
from jaxrl.errors import CollectiveOrderError, DistributedError, HangError
from jaxrl.sharding import make_mesh


@pytest.fixture(autouse=True)
def not_joined(monkeypatch):
    monkeypatch.setattr(startup, "_joined", None)


@pytest.mark.parametrize("arguments", [(), ("127.0.0.1:1", 1, 0)])
def test_join_alone_connects_nothing_and_gives_functions_back(arguments):
    with distributed.join(*arguments) as processes:
        jitted = jax.jit(lambda x: x + 1)

        assert processes.checked(jitted, name="step") is jitted
        assert (processes.index, processes.count, processes.first) == (0, 1, True)
        processes.enter("step", step=3)
        processes.idle("sampling")
        processes.verify("checkpoint")
        group = processes.group(make_mesh(fsdp=4, tensor=2), "fsdp")
        assert (group.rank, group.size, len(group.devices)) == (0, 1, 8)
        calls = processes.collectives(group)
        np.testing.assert_array_equal(calls.all_reduce([1.0, 2.0], "mean"), [1.0, 2.0])
        assert distributed.join() is processes
    assert processes.closed
    assert distributed.join() is not processes


def test_distributed_page_examples_run(repo_root):
    page = (repo_root / "docs" / "distributed.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)

    for example in examples:
        exec(compile(example, "docs/distributed.md", "exec"), {})

    assert len(examples) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", 2, 0), "coordinator='nowhere' must be host:port"),
        (("host:0", 2, 0), "must be host:port"),
        ((":9000", 2, 0), "must be host:port"),
        (("host:+1", 2, 0), "must be host:port"),
        (("host:" + 5000 * "9", 2, 0), "must be host:port"),
        ((9000, 2, 0), "coordinator=9000 must be host:port"),
        (("a..b:9000", 2, 1), "'a..b' cannot be the name of a machine"),
        (("h:9000", 0, 0), "num_processes=0 must be between 1 and 1048576"),
        (("h:9000", 1 << 40, 0), "num_processes=1099511627776 must be between 1 and 1048576"),
        (("h:9000", np.int64(2), np.int64(-1)), "process_id=-1 must be at least 0"),
        (("h:9000", 2, -1), "process_id=-1 must be at least 0"),
        (("h:9000", True, 0), "num_processes=True must be an integer"),
        (("h:9000", 2, "0"), "process_id='0' must be an integer"),
    ],
)
def test_join_bad_arguments_name_the_value_and_rule(arguments, message):
    with pytest.raises(DistributedError, match=message):
        distributed.join(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "timeout_s=0 must be seconds, above 0 and at most 1e8"),
        ({"timeout_s": float("nan")}, "timeout_s=nan must be seconds"),
        ({"timeout_s": None}, "timeout_s=None must be seconds"),
        ({"agree_timeout_s": float("inf")}, "agree_timeout_s=inf must be seconds"),
        ({"watch": 5}, "watch=5 must be a Watch"),
        ({"watch": Watch(heartbeat_s=-1)}, "watch.heartbeat_s=-1 must be seconds"),
        ({"fingerprint": "config"}, "fingerprint='config' must be a mapping"),
    ],
)
def test_join_bad_option_is_refused_also_alone(options, message):
    with pytest.raises(DistributedError, match=re.escape(message)):
        distributed.join(**options)


def test_join_again_as_another_process_says_which_it_is():
    with distributed.join() as processes:
        assert distributed.join("127.0.0.1:1", 1, 0) is processes
        with pytest.raises(
            DistributedError, match="num_processes=2: this process has joined already, as process 0"
        ):
            distributed.join("127.0.0.1:1", 2, 0)
        with pytest.raises(DistributedError, match="process_id=1: this process has joined"):
            distributed.join("127.0.0.1:1", 1, 1)


def test_join_after_first_use_of_jax_says_so():
    jax.devices()

    with pytest.raises(DistributedError, match="comes too late: JAX has already been used"):
        distributed.join("127.0.0.1:9", 2, 1, timeout_s=0.1)


def test_checked_alone_with_logs_records_and_runs_each_shape_once(tmp_path):
    processes = Processes.alone({}, tmp_path)
    traced = []

    def double(x, *, y=1):
        traced.append(x.shape)
        return 2 * x * y

    step = processes.checked(jax.jit(double), name="step")
    for size in (2, 3, 2, 3, 3):
        np.testing.assert_array_equal(step(jnp.ones(size)), 2 * np.ones(size))
    np.testing.assert_array_equal(step(np.ones(2, np.float32), y=3.0), [6.0, 6.0])

    assert traced == [(2,), (3,), (2,)]
    assert step._cache_size() == 3
    assert {program.name for program in read_programs(tmp_path)} == {"step"}
    assert len(read_programs(tmp_path)) == 3


def test_checked_error_of_the_function_is_its_own():
    step = Processes.alone({}, "unused").checked(jax.jit(lambda x: x @ x), name="step")

    with pytest.raises(TypeError, match="dot_general"):
        step(jnp.ones((2, 3)))


def test_fingerprint_holds_inputs_versions_and_facts():
    mine = fingerprint("step", "", {"x": np.zeros((2, 3), np.int32)}, {"config": {"a": 1}})

    assert mine.inputs == ("['x'] int32[2,3]",)
    assert mine.facts["config.a"] == "1"
    assert mine.facts["jax"] == jax.__version__
    assert mine.decode(mine.encode()) == mine


def test_source_digest_changes_with_content_and_name(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    first = source_digest(tmp_path)
    source_digest.cache_clear()
    (tmp_path / "a.py").write_text("x = 2")
    second = source_digest(tmp_path)
    source_digest.cache_clear()
    (tmp_path / "a.py").rename(tmp_path / "b.py")

    assert len({first, second, source_digest(tmp_path)}) == 3
    assert len(versions()["code of jaxrl"]) == 16


def test_process_state_of_child_is_seen():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        running = process_state(child.pid)
    finally:
        child.kill()
        child.wait()

    assert running == "running"
    assert process_state(child.pid) == "ended"


def test_axes_of_groups_are_those_along_which_members_differ():
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}

    assert axes_of([(0, 1), (2, 3)], sizes) == "tensor"
    assert axes_of([(0, 4)], sizes) == "data"
    assert axes_of([(0, 6), (6, 0)], sizes) == "data, fsdp"
    assert axes_of([(0, 8)], sizes) is None
    assert axes_of([(3,)], sizes) == ""


FAST = Watch(heartbeat_s=0.05, report_after_s=0.3, exit_after_s=0.9, dead_after_s=60, grace_s=600)
"""The grace is endless: this process must not end."""


def watchdogs(tmp_path, watch=FAST):
    ends = controls(2)
    sequences = [Sequence(), Sequence()]
    dogs = [
        Watchdog(end, sequence, watch, tmp_path)
        for end, sequence in zip(ends, sequences, strict=True)
    ]
    for end, dog in zip(ends, dogs, strict=True):
        end.may_wait, end.describe = dog.check, dog.describe
    return ends, sequences, dogs


def wait_for_failure(dog: Watchdog) -> DistributedError:
    deadline = time.monotonic() + 60
    while dog.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return dog.failure


def test_watchdog_finds_other_order_on_both(tmp_path):
    _, sequences, dogs = watchdogs(tmp_path)
    for sequence, entries in zip(sequences, ("abc", "acb"), strict=True):
        for entry in entries:
            sequence.append(entry)

    for dog in dogs:
        dog.start()
    found = [wait_for_failure(dog) for dog in dogs]
    for dog in dogs:
        dog.stop()

    for error in found:
        assert isinstance(error, CollectiveOrderError)
        assert "launch 2 differs: b in process 0; c in process 1 (after a on all)" in str(error)


def test_watchdog_reports_who_waits_then_raises(tmp_path):
    ends, sequences, dogs = watchdogs(tmp_path)
    sequences[0].append("step")
    dogs[0].now("running", "'step' step 7")
    dogs[1].now("idle", "a nap")

    for dog in dogs:
        dog.start()
    error = wait_for_failure(dogs[0])
    for dog in dogs:
        dog.stop()

    assert isinstance(error, HangError)
    assert "process 0 at launch 1, process 1 never arrived there" in str(error)
    assert "outside of programs a nap" in str(error)
    report = (tmp_path / "hang.process0.txt").read_text()
    assert "in 'step' step 7" in report
    assert "test_startup.py" in report
    with pytest.raises(HangError):  # what the main thread meets in its next wait
        ends[0].gather("tag", b"", timeout_s=60, waiting_for="something")


def test_watchdog_finds_silent_process(tmp_path):
    _, _, dogs = watchdogs(tmp_path, dataclasses.replace(FAST, dead_after_s=0.5))
    dogs[0].now("idle", "work")

    dogs[0].start()
    error = wait_for_failure(dogs[0])
    dogs[0].stop()

    assert "no sign of life of process 1" in str(error)
    assert "process 1: never heard" in str(error)


def test_watchdog_of_job_that_is_well_says_nothing(tmp_path):
    _, sequences, dogs = watchdogs(tmp_path)
    for dog in dogs:
        dog.now("idle", "work")
        dog.start()
    for _ in range(20):
        for sequence in sequences:
            sequence.append("step")
        time.sleep(0.05)
    for dog in dogs:
        dog.stop()

    assert [dog.failure for dog in dogs] == [None, None]
    assert list(tmp_path.iterdir()) == []


def test_group_rank_is_the_place_among_processes():
    group = Group(("data",), (1, 4, 7), (), 4)

    assert (group.rank, group.size, group.name) == (1, 3, "data of processes 1, 4, 7")

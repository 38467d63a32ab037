"""Jobs of real processes: what is right works, and nothing that is wrong hangs or goes unseen.

Times in these tests only bound how long a hang may last; they assert nothing about speed.
"""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from distributed.processes import Job, free_port, run

from jaxrl.distributed.record import read_programs
from jaxrl.distributed.watchdog import EXIT_WATCHDOG

pytestmark = pytest.mark.distributed


def assert_all_fail(ended, *words: str) -> None:
    """Each process has ended by itself, with an error that says `words`."""
    for each in ended:
        assert each.code in (1, EXIT_WATCHDOG), each.text
        assert "done" not in each.out
        for word in words:
            assert word in each.err, each.err


def test_job_that_agrees_gives_the_numbers_of_one_process(tmp_path):
    ended = run(tmp_path, "good")

    assert [each.code for each in ended] == [0, 0], ended
    assert all("done 3.0 30.0" in each.out for each in ended)  # asserts its numbers itself
    programs = read_programs(tmp_path)
    assert [program.name for program in programs] == ["one", "two", "one", "by hand"]
    (reduced,) = programs[0].collectives
    assert (reduced.kind, reduced.reduction, reduced.groups) == ("all-reduce", "sum", ((0, 1),))
    assert json.loads((tmp_path / "collectives.json").read_text())[0]["inputs"]


def test_job_with_skipped_step_names_the_launch_on_all(tmp_path):
    ended = run(tmp_path, "skip")

    assert_all_fail(ended, "launch 7 differs: 'one' step 5 in process 0; 'one' step 6 in process 1")


def test_job_with_swapped_programs_of_same_shapes_is_error_on_all(tmp_path):
    ended = run(tmp_path, "swapped")

    assert_all_fail(ended, "launch 5 differs: 'one' step 0 in process 0; 'two' step 0 in process 1")


@pytest.mark.slow
def test_job_with_other_shape_names_inputs_and_collective_on_all(tmp_path):
    ended = run(tmp_path, "shapes")

    assert_all_fail(
        ended,
        "CollectiveOrderError: program 'one': input 0 differs: [0] float32[8]",
        "collective 0 differs: all-reduce sum f32[4] over [[0,1]] in process 0; "
        "all-reduce sum f32[8] over [[0,1]] in process 1",
    )


@pytest.mark.parametrize("killed", [0, 1], ids=["coordinator", "other"])
def test_job_whose_process_is_killed_ends_on_the_others(tmp_path, killed):
    with Job(tmp_path, "steps") as job:
        job.wait_for("running", [0, 1])
        job.signal(killed, signal.SIGKILL)
        survivors = job.ended([1 - killed])

    assert_all_fail(survivors, f"process {killed} has ended without a word")


def test_job_whose_process_is_stopped_ends_with_a_report(tmp_path):
    with Job(tmp_path, "steps") as job:
        job.wait_for("running", [0, 1])
        job.signal(1, signal.SIGSTOP)
        (survivor,) = job.ended([0])

    assert survivor.code == EXIT_WATCHDOG, survivor.text
    assert "last seen" not in survivor.err  # it has said more itself
    assert "no sign of life of process 1" in survivor.err
    assert "it is stopped" in survivor.err
    report = (tmp_path / "hang.process0.txt").read_text()
    assert "process 1 never arrived there" in report
    assert "worker.py" in report  # where every thread stands


@pytest.mark.slow
def test_job_with_other_config_is_error_on_all(tmp_path):
    ended = run(tmp_path, "config")

    assert_all_fail(ended, "config.train.seed: 0 in process 0; 7 in process 1")


@pytest.mark.slow
def test_job_with_duplicate_id_is_error_on_all(tmp_path):
    ended = run(tmp_path, "meet", ids=[0, 1, 1], counts=[3, 3, 3])

    assert_all_fail(ended, "process_id=1 is taken 2 times", "process 2 of 3 did not arrive")


@pytest.mark.slow
def test_job_with_step_skipped_at_the_end_counts_launches(tmp_path):
    ended = run(tmp_path, "skip_unnumbered")

    assert_all_fail(ended, "process 1 ended with fewer launches than others", "11 in process 0")


@pytest.mark.slow
def test_job_whose_first_programs_are_swapped_is_error_on_all(tmp_path):
    ended = run(tmp_path, "swapped_first")

    assert_all_fail(ended, "CollectiveOrderError", "one", "two")


@pytest.mark.slow
def test_job_with_other_shape_later_names_the_launch_on_all(tmp_path):
    ended = run(tmp_path, "late_shape")

    assert_all_fail(ended, "launch 7 differs: 'one' in process 0; first run of 'one' with inputs")


@pytest.mark.slow
def test_job_with_other_collective_names_it_on_all(tmp_path):
    ended = run(tmp_path, "kinds")

    assert_all_fail(
        ended,
        "collective 0 differs: all-reduce sum f32[4] over [[0,1]] in process 0; "
        "all-gather f32[2,4] over [[0,1]] in process 1",
    )


@pytest.mark.slow
def test_job_with_other_code_is_error_on_all(tmp_path):
    ended = run(tmp_path, "code", 3)

    assert_all_fail(ended, "code of jaxrl: ", "in processes 0, 1; changed in process 2")


@pytest.mark.slow
def test_job_with_wrong_count_is_error_on_all(tmp_path):
    ended = run(tmp_path, "meet", counts=[2, 3])

    assert_all_fail(ended, "num_processes differs: 2 in process 0; 3 in process 1")


@pytest.mark.slow
def test_job_without_one_process_names_it_on_all(tmp_path):
    ended = run(tmp_path, "meet", ids=[0, 1], counts=[3, 3])

    assert_all_fail(ended, "process 2 of 3 did not arrive")


@pytest.mark.slow
def test_job_without_coordinator_says_where_it_looked(tmp_path):
    ended = run(tmp_path, "unreachable", ids=[1], counts=[2])

    assert_all_fail(ended, "process 1 cannot reach the coordinator, process 0, at 127.0.0.1:")


@pytest.mark.slow
def test_job_whose_process_never_comes_ends_with_a_report_on_all(tmp_path):
    ended = run(tmp_path, "waiting", 3)

    assert_all_fail(ended, "processes 0, 1 at launch 3, process 2 never arrived there")
    report = (tmp_path / "hang.process0.txt").read_text()
    assert "outside of programs after the exchange of 'a share'" in report


@pytest.mark.slow
def test_job_whose_process_raises_tells_the_others_why(tmp_path):
    ended = run(tmp_path, "raising", 3)

    assert_all_fail(ended, "the data is broken")
    assert "process 2 left the job: ValueError: the data is broken" in ended[0].err


@pytest.mark.slow
def test_job_whose_coordinator_is_stopped_ends_with_a_report(tmp_path):
    with Job(tmp_path, "steps") as job:
        job.wait_for("running", [0, 1])
        job.signal(0, signal.SIGSTOP)
        (survivor,) = job.ended([1])

    assert survivor.code == EXIT_WATCHDOG, survivor.text
    assert "no sign of life of process 0" in survivor.err


@pytest.mark.slow
def test_job_whose_coordination_service_is_killed_leaves_last_words(tmp_path):
    with Job(tmp_path, "steps") as job:
        job.wait_for("running", [0, 1])
        job.wait_for("service=", [0])
        pid = re.search(r"service=(\d+)\.", job.read(0, "out")).group(1)
        os.kill(int(pid), signal.SIGKILL)
        ended = job.ended()
        job.wait_for("last seen: process 0", [0, 1], kind="err")

    for place, each in enumerate(ended):
        assert each.code not in (0, None)  # JAX ends them, with SIGABRT
        assert f"process {place} (pid" in job.read(place, "err")
        assert "process 1 (" in (tmp_path / f"hang.process{place}.txt").read_text()


@pytest.mark.slow
def test_job_can_be_started_again_at_the_same_port_at_once(tmp_path):
    port = free_port()

    for attempt in range(2):
        ended = run(tmp_path / str(attempt), "good", devices=2, port=port)

        assert [each.code for each in ended] == [0, 0], ended
        assert all("done 6.0 60.0" in each.out for each in ended)

"""The run's directory: layout, lock, early refusal, and the trajectories of each update."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxrl.errors import DataError, OutputError
from jaxrl.orchestration.run_dir import RunDir, write_atomically
from jaxrl.types import NO_VERSION, Trajectory, TrajectoryGroup


def _trajectory(sample_id: str, index: int, length: int) -> Trajectory:
    rng = np.random.default_rng(length)
    mask = np.arange(length) > 1
    logp = np.where(mask, -rng.random(length), 0).astype(np.float32)
    return Trajectory(
        sample_id,
        sample_id.rpartition("/")[0],
        index,
        rng.integers(0, 1000, length).astype(np.int32),
        mask,
        logp,
        np.where(mask, 3 + (np.arange(length) > 4), NO_VERSION).astype(np.int32),
        0.1 * length,
        "length" if length % 2 else "stop",
        "grüße",
    )


@pytest.fixture
def groups() -> list[TrajectoryGroup]:
    return [
        TrajectoryGroup(
            f"p{g}", g, tuple(_trajectory(f"p{g}/{i}", g, 3 + 2 * g + i) for i in range(3))
        )
        for g in range(2)
    ]


def test_acquire_creates_the_layout_and_leaves_no_probe(tmp_path):
    with RunDir(tmp_path / "a" / "run") as run:
        names = {p.name for p in run.path.iterdir()}
        inside = [p for folder in run.folders for p in folder.iterdir()]

    assert names == {
        "metrics",
        "weights",
        "checkpoints",
        "trajectories",
        "plots",
        "logs",
        ".lock",
    }
    assert inside == []


def test_run_dir_made_only_to_read_touches_nothing(tmp_path):
    run = RunDir(tmp_path / "run")

    assert run.ledger.name == "ledger.jsonl"
    assert run.updates_with_trajectories() == []
    assert not run.path.exists()


def test_acquire_directory_of_a_live_run_is_refused_until_it_ends(tmp_path):
    code = (
        "import sys\n"
        "from jaxrl.orchestration.run_dir import RunDir\n"
        "run = RunDir(sys.argv[1]).acquire()\n"
        "sys.stdout.write('in\\n'); sys.stdout.flush()\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(OutputError, match=f"in use by another run .process {other.pid} "):
            RunDir(tmp_path).acquire()
    finally:
        # A killed process leaves its lock file, but not its lock.
        other.kill()
        other.communicate()

    with RunDir(tmp_path) as run:
        assert run.ledger.parent == tmp_path


def test_acquire_twice_in_one_process_is_refused_and_release_lets_in(tmp_path):
    first = RunDir(tmp_path).acquire()

    with pytest.raises(OutputError, match="in use by another run"):
        RunDir(tmp_path).acquire()
    first.release()
    first.release()

    RunDir(tmp_path).acquire().release()


def test_acquire_file_in_the_way_is_output_error(tmp_path):
    (tmp_path / "run").write_text("")

    with pytest.raises(OutputError, match=r"cannot create the directory .*run.*file stands in"):
        RunDir(tmp_path / "run").acquire()
    with pytest.raises(OutputError, match="a part of the path is a file"):
        RunDir(tmp_path / "run" / "below").acquire()


def test_acquire_without_permission_is_output_error(tmp_path):
    (tmp_path / "run").mkdir(mode=0o500)
    code = (
        "import os, sys\n"
        "from jaxrl.orchestration.run_dir import RunDir\n"
        "os.geteuid() or os.setuid(65534)\n"
        "try:\n"
        "    RunDir(sys.argv[1]).acquire()\n"
        "except OSError as error:\n"
        "    sys.stdout.write(type(error).__name__ + ': ' + str(error))\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True
    )

    assert "OutputError: cannot" in result.stdout, result.stderr
    assert "this user needs permission to write there" in result.stdout


def test_acquire_full_disk_is_output_error_naming_the_folder(tmp_path):
    # The process may not write files beyond 1000 bytes: the probe has to notice by writing.
    code = (
        "import resource, signal, sys\n"
        "from jaxrl.orchestration.run_dir import RunDir\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    RunDir(sys.argv[1]).acquire()\n"
        "except OSError as error:\n"
        "    sys.stdout.write(type(error).__name__ + ': ' + str(error))\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )

    assert f"OutputError: cannot write 1048576 bytes in {tmp_path}/metrics" in result.stdout
    assert list((tmp_path / "metrics").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "rule"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "the file system is read-only")],
)
def test_write_atomically_failure_names_the_rule_and_keeps_the_old_file(
    tmp_path, monkeypatch, number, rule
):
    path = tmp_path / "config.json"
    path.write_text("old")

    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match=f"cannot write the file {path}.*{rule}"):
        write_atomically(path, b"new")

    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_mark_is_found_in_the_same_folder_and_in_no_other(tmp_path):
    with RunDir(tmp_path / "one") as one, RunDir(tmp_path / "other") as other:
        earlier, mark = one.leave_mark(), one.leave_mark()
        other.leave_mark()

        RunDir(tmp_path / "one").find_mark(mark)
        for folder, wanted in ((other, mark), (one, earlier), (RunDir(tmp_path / "none"), mark)):
            with pytest.raises(OutputError, match="is not the folder that process 0") as told:
                folder.find_mark(wanted, wait_s=0.2)
            assert str(folder.path) in str(told.value)


def test_write_config_that_differs_keeps_the_older_ones(tmp_path):
    run = RunDir(tmp_path)

    for value in (1, 1, 2, 3):
        run.write_config({"seed": value})

    assert '"seed": 3' in run.config.read_text()
    assert '"seed": 1' in (tmp_path / "config.1.json").read_text()
    assert '"seed": 2' in (tmp_path / "config.2.json").read_text()
    assert len(list(tmp_path.iterdir())) == 3


def test_trajectories_come_back_bit_for_bit(tmp_path, groups):
    with RunDir(tmp_path) as run:
        path = run.write_trajectories(12, groups, {3: "d3", 4: "d4", 5: "unused"})
        back, digests = run.read_trajectories(12)
        updates = run.updates_with_trajectories()

    assert path.name == "update_00000012.npz"
    assert (updates, digests) == ([12], {3: "d3", 4: "d4"})
    assert [(g.group_id, g.prompt_index) for g in back] == [("p0", 0), ("p1", 1)]
    for group, restored in zip(groups, back, strict=True):
        for a, b in zip(group.trajectories, restored.trajectories, strict=True):
            for name in ("tokens", "loss_mask", "logprobs", "versions"):
                left, right = getattr(a, name), getattr(b, name)
                assert left.dtype == right.dtype
                assert left.tobytes() == right.tobytes()
            assert (a.sample_id, a.reward, a.finish_reason, a.text) == (
                b.sample_id,
                b.reward,
                b.finish_reason,
                b.text,
            )


def test_write_trajectories_version_without_digest_is_refused(tmp_path, groups):
    with RunDir(tmp_path) as run:
        with pytest.raises(DataError, match=r"versions \[4\] without a digest"):
            run.write_trajectories(0, groups, {3: "d3"})
        assert run.updates_with_trajectories() == []


def test_read_trajectories_missing_or_foreign_file_is_data_error(tmp_path):
    with RunDir(tmp_path) as run:
        run.trajectories_of(1).write_bytes(b"PK\x03\x04 nonsense")
        np.savez(run.trajectories_of(2), other=np.zeros(3))
        for update in (0, 1, 2):
            with pytest.raises(DataError, match=f"update_{update:08d}.npz is not a file of"):
                run.read_trajectories(update)

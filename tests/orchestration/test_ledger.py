"""The run ledger: nothing lost, nothing reordered, torn lines repaired, versions provable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxrl.errors import DataError, OutputError, WeightVersionError
from jaxrl.orchestration.ledger import (
    Ledger,
    consumed_samples,
    effective,
    published_versions,
    read_ledger,
)
from jaxrl.types import NO_VERSION, Trajectory, TrajectoryGroup, WeightVersion


def _group(index: int, *versions: int) -> TrajectoryGroup:
    mask = np.array([False] + [True] * len(versions))
    members = [
        Trajectory(
            f"p{index}/{i}",
            f"p{index}",
            index,
            np.arange(len(mask), dtype=np.int32),
            mask,
            np.where(mask, np.float32(-0.1), np.float32(0)),
            np.array([NO_VERSION, *versions], np.int32),
            float(i),
            "stop",
        )
        for i in range(2)
    ]
    return TrajectoryGroup(f"p{index}", index, tuple(members))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_append_numbers_events_and_keeps_fields(path):
    with Ledger(path) as ledger:
        seqs = [ledger.append("started", version=0), ledger.append("finished", version=2)]

    records = read_ledger(path)
    assert seqs == [0, 1]
    assert [(r["seq"], r["event"], r["version"]) for r in records] == [
        (0, "started", 0),
        (1, "finished", 2),
    ]
    assert all(r["time"] > 1e9 for r in records)


def test_append_many_threads_leaves_no_gap_and_no_torn_line(path):
    ledger = Ledger(path)

    def work(worker: int) -> None:
        for i in range(50):
            ledger.append("accepted", group_id=f"{worker}-{i}", detail="ö\n" * 20)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.close()

    records = read_ledger(path)
    assert len({r["group_id"] for r in records}) == len(records) == 400


def test_append_unknown_event_or_reserved_field_is_refused(path):
    ledger = Ledger(path)

    with pytest.raises(ValueError, match="unknown ledger event 'eaten'"):
        ledger.append("eaten")
    with pytest.raises(ValueError, match="seq"):
        ledger.append("started", seq=4)
    assert read_ledger(path) == []


def test_append_numpy_and_not_finite_numbers_become_json(path):
    with Ledger(path) as ledger:
        ledger.append("evaluated", a=np.float32(0.5), b=np.arange(2), c=float("nan"), d={1: "x"})

    (record,) = read_ledger(path)
    assert (record["a"], record["b"], record["c"], record["d"]) == (0.5, [0, 1], "nan", {"1": "x"})


def test_reopen_continues_the_numbers(path):
    with Ledger(path) as ledger:
        ledger.append("started", version=0)
    with Ledger(path) as ledger:
        assert ledger.append("resumed", version=0) == 1

    assert [r["seq"] for r in read_ledger(path)] == [0, 1]


def test_reopen_after_a_torn_line_sets_it_aside(path):
    with Ledger(path) as ledger:
        ledger.append("started", version=0)
    with path.open("a") as file:
        file.write('{"seq":1,"time":0,"ev')

    assert len(read_ledger(path)) == 1
    with Ledger(path) as ledger:
        ledger.append("finished", version=0)

    assert [r["event"] for r in read_ledger(path)] == ["started", "finished"]
    assert Path(f"{path}.torn").read_text() == '{"seq":1,"time":0,"ev\n'


def test_killed_writer_loses_no_event_that_append_returned_from(path):
    code = (
        "import sys\n"
        "from jaxrl.orchestration.ledger import Ledger\n"
        "ledger = Ledger(sys.argv[1])\n"
        "while True:\n"
        "    sys.stdout.write(f\"{ledger.append('accepted', pad='x' * 500)}\\n\")\n"
        "    sys.stdout.flush()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        for _ in range(30):
            last = int(process.stdout.readline())
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()

    Ledger(path).close()
    assert len(read_ledger(path)) > last


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"seq": 1, "event": "started"}'], ":1 has seq 1, expected 0"),
        (['{"seq": 0, "event": "started"}', '{"seq": 2, "event": "started"}'], ":2 has seq 2"),
        (['{"seq": 0, "event": "eaten"}'], ":1 has the unknown event 'eaten'"),
        (['{"seq": 0, "event": "started"}', "[]"], ":2 is not a ledger record"),
        (["garbage"], ":1 is not a ledger record"),
    ],
)
def test_read_ledger_malformed_line_is_named(path, lines, message):
    path.write_text("".join(line + "\n" for line in lines))

    with pytest.raises(DataError, match=message):
        read_ledger(path)
    with pytest.raises(DataError, match=message):
        Ledger(path)


def test_read_ledger_missing_file_is_data_error(path):
    with pytest.raises(DataError, match="cannot read the ledger"):
        read_ledger(path)


def test_consumed_records_samples_version_ranges_and_digests(path):
    with Ledger(path) as ledger:
        for number in range(4):
            ledger.published(WeightVersion(number, f"d{number}"))
        ledger.consumed([_group(5, 2, 2, 3), _group(7, 3)], 3)

    first, second = [r for r in read_ledger(path) if r["event"] == "consumed"]
    assert (first["update"], first["group_id"], first["prompt_index"]) == (3, "p5", 5)
    assert first["digests"] == {"2": "d2", "3": "d3"}
    assert second["digests"] == {"3": "d3"}
    assert first["samples"][1] == {
        "sample_id": "p5/1",
        "tokens": 3,
        "first_version": 2,
        "last_version": 3,
        "reward": 1.0,
    }


def test_consumed_token_of_a_version_never_published_is_refused_and_nothing_written(path):
    with Ledger(path) as ledger:
        ledger.published(WeightVersion(2, "d2"))
        with pytest.raises(WeightVersionError, match=r"p7/0 holds tokens of version 4.*\[2\]"):
            ledger.consumed([_group(5, 2), _group(7, 2, 4)], 2)

    assert [r["event"] for r in read_ledger(path)] == ["published"]


def test_published_digests_survive_reopening_but_not_a_resume_before_them(path):
    with Ledger(path) as ledger:
        for number in range(3):
            ledger.published(WeightVersion(number, f"d{number}"))
    with Ledger(path) as ledger:
        ledger.consumed([_group(0, 2)], 2)
        ledger.append("resumed", version=1)
        with pytest.raises(WeightVersionError, match="version 2"):
            ledger.consumed([_group(0, 2)], 2)
        ledger.published(WeightVersion(2, "other"))

    assert published_versions(read_ledger(path)) == {0: "d0", 1: "d1", 2: "other"}


def test_published_again_with_another_digest_is_refused(path):
    with Ledger(path) as ledger:
        ledger.published(WeightVersion(3, "d3"), where="memory")
        ledger.published(WeightVersion(3, "d3"), where="store")
        with pytest.raises(WeightVersionError, match=r"version 3 .* d3, and again with other"):
            ledger.published(WeightVersion(3, "other"))

    assert len(read_ledger(path)) == 2


def test_queries_leave_out_what_a_resume_made_void(path):
    with Ledger(path) as ledger:
        ledger.published(WeightVersion(0, "d0"))
        ledger.consumed([_group(0, 0)], 0)
        ledger.append("updated", update=0, version=1)
        ledger.published(WeightVersion(1, "d1"))
        ledger.append("checkpointed", version=1)
        ledger.consumed([_group(1, 1)], 1)
        ledger.append("updated", update=1, version=2)
        ledger.published(WeightVersion(2, "d2"))
        ledger.append("resumed", version=1)
        ledger.consumed([_group(2, 1)], 1)

    records = read_ledger(path)
    assert consumed_samples(records) == {0: ["p0/0", "p0/1"], 1: ["p2/0", "p2/1"]}
    assert [r["seq"] for r in effective(records)] == [0, 1, 2, 3, 4, 8, 9]


def test_queries_leave_out_everything_before_a_new_start(path):
    with Ledger(path) as ledger:
        ledger.append("started", version=0)
        ledger.published(WeightVersion(0, "d0"))
        ledger.consumed([_group(0, 0)], 0)
        ledger.append("started", version=0)
        ledger.published(WeightVersion(0, "other"))
        ledger.consumed([_group(1, 0)], 0)

    records = read_ledger(path)
    assert consumed_samples(records) == {0: ["p1/0", "p1/1"]}
    assert published_versions(records) == {0: "other"}


def test_append_to_a_file_that_cannot_grow_is_output_error_and_leaves_it_valid(path):
    # A file-size limit fails writes as a full disk does, in the middle of a line too.
    code = (
        "import resource, signal, sys\n"
        "from jaxrl.errors import OutputError\n"
        "from jaxrl.orchestration.ledger import Ledger, read_ledger\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "ledger = Ledger(sys.argv[1])\n"
        "ledger.append('started', version=0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try:\n"
        "    ledger.append('accepted', pad='x' * 200)\n"
        "except OutputError as error:\n"
        "    sys.stdout.write(str(error))\n"
        "assert len(read_ledger(sys.argv[1])) == 1\n"
        "assert open(sys.argv[1]).read().endswith('\\n')\n"
    )

    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    assert f"cannot write to the ledger {path}" in result.stdout


def test_append_after_close_is_output_error(path):
    ledger = Ledger(path)
    ledger.close()
    ledger.close()

    with pytest.raises(OutputError, match="is closed"):
        ledger.append("started", version=0)


def test_ledger_in_a_missing_folder_is_output_error(tmp_path):
    with pytest.raises(OutputError, match="cannot open the ledger"):
        Ledger(tmp_path / "none" / "ledger.jsonl")


def test_ledger_lines_are_plain_json_objects(path, read_jsonl):
    with Ledger(path) as ledger:
        ledger.append("started", version=0)

    assert read_jsonl(path)[0]["event"] == "started"
    assert json.loads(path.read_text())["seq"] == 0

"""The tracker fetches one step late and in one transfer; its writers survive kills and NaN."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.errors import DataError, OutputError
from jaxrl.observe.tracker import Tracker
from jaxrl.observe.writers import JsonlWriter, TensorBoardWriter, read_metrics


class ListWriter:
    def __init__(self):
        self.rows = []
        self.closed = 0

    def write(self, step, values, wall_time):
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed += 1


@pytest.fixture
def transfers(monkeypatch):
    """Every tree that is fetched from the devices."""
    seen = []
    real = jax.device_get

    def spy(tree):
        seen.append(tree)
        return real(tree)

    monkeypatch.setattr(jax, "device_get", spy)
    return seen


def test_log_fetches_only_the_step_before_in_one_transfer(transfers):
    writer = ListWriter()
    tracker = Tracker([writer])

    tracker.log(1, {"loss": jnp.float32(1.5), "n": 3})
    assert (transfers, writer.rows) == ([], [])
    tracker.log(2, {"loss": jnp.float32(2.5)})
    assert len(transfers) == 1
    assert writer.rows == [(1, {"loss": 1.5, "n": 3.0})]
    tracker.close()

    assert writer.rows[1:] == [(2, {"loss": 2.5})]
    assert writer.closed == 1


class NotYetComputed:
    """An array whose value nobody may ask for before it is ready; its shape is known."""

    shape = ()
    ready = False

    def __array__(self, dtype=None, copy=None):
        assert self.ready, "the value was asked for while the device was computing it"
        return np.float32(4.0)


def test_log_does_not_ask_for_a_value_that_is_not_computed():
    writer, value = ListWriter(), NotYetComputed()
    tracker = Tracker([writer])

    tracker.log(1, {"loss": value})
    tracker.log(1, {"other": 1.0})
    value.ready = True
    tracker.log(2, {"loss": NotYetComputed()})

    assert writer.rows == [(1, {"loss": 4.0, "other": 1.0})]


def test_log_twice_in_one_step_is_one_record():
    writer = ListWriter()

    with Tracker([writer]) as tracker:
        tracker.log(5, {"a": 1.0})
        tracker.log(5, {"b": 2.0})

    assert writer.rows == [(5, {"a": 1.0, "b": 2.0})]


def test_log_vector_or_step_back_is_refused():
    tracker = Tracker([])
    tracker.log(3, {"a": 1.0})

    with pytest.raises(ValueError, match=r"metric b has shape \(2,\)"):
        tracker.log(4, {"b": jnp.zeros(2)})
    with pytest.raises(ValueError, match="step 2 after those of step 3"):
        tracker.log(2, {"a": 1.0})


def test_flush_replicated_array_of_many_devices_is_one_number():
    mesh = jax.make_mesh((8,), ("data",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    tracker = Tracker([])

    tracker.log(0, {"loss": jax.device_put(np.float32(0.25), replicated)})

    assert tracker.flush() == {"loss": 0.25}


def test_jsonl_numbers_that_are_not_finite_are_strings_and_come_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)

    writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1}, 12.0)

    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert line == {"step": 1, "time": 12.0, "a": "nan", "b": "inf", "c": "-inf", "d": 0.1}
    (record,) = read_metrics(path)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"], record["d"]) == (math.inf, -math.inf, 0.1)


def test_jsonl_killed_process_leaves_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys, time\n"
        "from jaxrl.observe.writers import JsonlWriter\n"
        "writer = JsonlWriter(sys.argv[1])\n"
        "for i in range(10): writer.write(i, {'x': float(i)}, 0.0)\n"
        "sys.stdout.write('written\\n'); sys.stdout.flush()\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()

    assert [r["x"] for r in read_metrics(path)] == [float(i) for i in range(10)]


def test_jsonl_reopened_after_a_torn_line_goes_on_cleanly(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0, "x": 1.0}\n{"step": 2, "ti')

    JsonlWriter(path).write(2, {"x": 5.0}, 0.0)

    assert [(r["step"], r["x"]) for r in read_metrics(path)] == [(1, 1.0), (2, 5.0)]


def test_read_metrics_steps_repeated_by_a_resume_later_value_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step, x in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9)):
        writer.write(step, {"x": x}, 0.0)

    assert [(r["step"], r["x"]) for r in read_metrics(path)] == [(1, 0.1), (2, 0.9), (3, 0.3)]


def test_read_metrics_malformed_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnothing\n')

    with pytest.raises(DataError, match=r"metrics.jsonl:2"):
        read_metrics(path)


def test_jsonl_writer_in_a_missing_folder_is_output_error(tmp_path):
    with pytest.raises(OutputError, match="cannot write metrics"):
        JsonlWriter(tmp_path / "none" / "metrics.jsonl")


def test_tensorboard_writer_makes_an_event_file(tmp_path):
    with Tracker([TensorBoardWriter(tmp_path / "tb")]) as tracker:
        for step in range(3):
            tracker.log(step, {"loss": float(step)})

    (file,) = (tmp_path / "tb").iterdir()
    assert b"loss" in file.read_bytes()

"""Training with several processes: the same weights as with one, each prompt once, one stop for
all."""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from distributed.processes import Job

from jaxrl.config import CheckpointConfig, MeshConfig
from jaxrl.config.serialize import to_record
from jaxrl.errors import ConfigError
from jaxrl.orchestration import inputs
from jaxrl.orchestration.rl import RLTrainer
from jaxrl.orchestration.sft import SFTTrainer
from jaxrl.weights.store import WeightStore

pytestmark = pytest.mark.distributed

MESH = MeshConfig(data=2, fsdp=-1)


def run_job(tmp_path, config, scenario, count, devices):
    """The ends of the processes; what they write is below tmp_path / "job"."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(to_record(config), default=str))
    folder, worker = tmp_path / "job", "orchestration/host_worker.py"
    with Job(folder, scenario, count, devices=devices, worker=worker) as job:
        return job.ended()


def said(ended) -> list[dict]:
    """What the processes wrote last."""
    assert [each.code for each in ended] == [0] * len(ended), "\n".join(e.text for e in ended)
    return [json.loads(each.out.splitlines()[-1]) for each in ended]


def events(config, name="ledger.jsonl") -> list[dict]:
    path = f"{config.output_dir}/{name}"
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def assert_same_weights(one, other, *, atol) -> None:
    """The last version of two runs."""
    first, second = (WeightStore(f"{c.output_dir}/weights").restore()[0] for c in (one, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), first, second)


def test_supervised_run_of_two_processes_has_the_weights_of_one(tmp_path, make_config):
    # One layer: each process compiles for itself.
    sizes = {"model": {"n_layers": 1}, "sft": {"steps": 2}, "checkpoint": CheckpointConfig()}
    together, alone = (make_config(folder, **sizes) for folder in ("together", "alone"))

    results = said(run_job(tmp_path, together, "sft", 2, 1))
    with SFTTrainer(alone, devices=jax.devices()[:2]) as trainer:
        version = trainer.fit()

    # Bit for bit: two processes with a device each are the two devices of one process.
    assert [each["version"] for each in results] == [str(version)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
def test_run_of_several_processes_samples_and_trains_what_one_does(
    tmp_path, make_config, count, devices
):
    changes = {"mesh": MESH, "eval": {"size": 7}, "checkpoint": {"every": 2}}
    together, alone = (make_config(folder, **changes) for folder in ("together", "alone"))

    results = said(run_job(tmp_path, together, "rl", count, devices))
    with RLTrainer(alone, devices=jax.devices()[:4]) as trainer:
        evaluation = trainer.fit()["after"].metrics()

    assert len({each["version"] for each in results}) == 1
    assert all(each["evaluation"] == evaluation for each in results)
    # The sampler of each process has fewer devices: the last bits of log-probabilities differ.
    assert_same_weights(together, alone, atol=1e-6)
    consumed = [e for e in events(together) if e["event"] == "consumed"]
    assert [e["prompt_index"] for e in consumed] == list(range(4 * 4))
    of_one = [e for e in events(alone) if e["event"] == "consumed"]
    assert [e["samples"] for e in consumed] == [e["samples"] for e in of_one]


@pytest.mark.slow
def test_signal_to_one_process_stops_all_and_the_run_goes_on(tmp_path, make_config):
    changes = {"mesh": MESH, "sft": {"steps": 0}}
    stopped, straight = (make_config(folder, **changes) for folder in ("stopped", "straight"))

    ended = run_job(tmp_path, stopped, "interrupted", 2, 1)
    results = said(run_job(tmp_path, stopped, "rl", 2, 1))
    expected = said(run_job(tmp_path / "other", straight, "rl", 2, 1))

    assert all(each.code not in (0, None) for each in ended), ended
    assert [each["version"] for each in results] == [each["version"] for each in expected]
    prompts = collections.Counter(
        e["prompt_index"] for e in events(stopped) if e["event"] == "consumed"
    )
    assert prompts == dict.fromkeys(range(16), 1)


@pytest.mark.slow
def test_error_in_one_process_ends_all_and_names_it(tmp_path, make_config):
    config = make_config(mesh=MESH, sft={"steps": 0})

    ended = run_job(tmp_path, config, "fails", 2, 1)

    assert all(each.code not in (0, None) for each in ended), ended
    assert "process 1 failed at collecting a batch" in ended[0].text
    assert "the collector is not running" in ended[0].text


def test_processes_that_see_other_folders_are_refused_before_anything_is_trained(
    tmp_path, make_config
):
    config = dataclasses.replace(make_config(mesh=MESH), output_dir="run")
    for host in "01":
        # Somebody has run something there before.
        (tmp_path / "job" / host / "run" / "logs").mkdir(parents=True)

    ended = run_job(tmp_path, config, "apart", 2, 1)

    assert all(each.code == 1 for each in ended), ended
    for each in ended:
        assert "is not the folder that process 0 writes to" in each.text
        assert str(tmp_path / "job" / "1" / "run") in each.text
    assert not any((tmp_path / "job" / "0" / "run" / "checkpoints").iterdir())


def test_processes_that_read_other_data_are_refused_before_anything_is_written(
    tmp_path, make_config, questions
):
    config = make_config(mesh=MESH, data={"path": "questions.jsonl"})
    rows = questions.read_text().splitlines()
    for host, lines in (("0", rows), ("1", rows[1:])):
        folder = tmp_path / "job" / host
        folder.mkdir(parents=True)
        (folder / "questions.jsonl").write_text("\n".join(lines))

    ended = run_job(tmp_path, config, "apart", 2, 1)

    for each in ended:
        assert each.code == 2, each.text
        assert "processes read different files: training examples of questions.jsonl" in each.text
        assert "tokenizer" not in each.text
    assert not Path(config.output_dir).exists()


def test_digest_of_weights_is_that_of_what_the_files_hold(tmp_path, make_config):
    def digest(folder, data, name="model.safetensors"):
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / name).write_bytes(data)
        return inputs._weights_digest(str(path))

    data = np.random.default_rng(0).bytes(3 << 20)
    other = data[:-1] + bytes([data[-1] ^ 1])

    assert digest("a", data) == digest("b", data) == digest("b", b"notes", "notes.txt")
    assert (
        len({digest("a", data), digest("c", other), digest("d", data[:-1]), digest("e", b"")}) == 4
    )


def test_prompts_that_processes_cannot_share_are_refused_with_the_numbers(make_config, monkeypatch):
    monkeypatch.setattr("jaxrl.orchestration.hosts.count", lambda: 3)
    parts = RLTrainer(make_config()).parts
    monkeypatch.setattr(type(parts), "sampler_mesh", parts.mesh)

    with pytest.raises(ConfigError, match=r"train\.batch_size=16 must be a multiple of 3 proc"):
        parts.check()

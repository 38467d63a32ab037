"""The configs of SmolLM2: they load, and the slow tests train its weights (JAXRL_SMOLLM2_GGUF)."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.config import ExperimentConfig, load_config_file, preset
from jaxrl.config.published import published_record
from jaxrl.errors import ConfigError
from jaxrl.observe.writers import read_metrics
from jaxrl.orchestration.ledger import consumed_samples, published_versions, read_ledger
from jaxrl.orchestration.rl import RLTrainer
from jaxrl.orchestration.run_dir import RunDir
from jaxrl.orchestration.session import Parts
from jaxrl.orchestration.sft import SFTTrainer
from jaxrl.rollout.collate import collate, rows_for
from jaxrl.train.engine import TrainEngine
from jaxrl.train.objectives import grpo_objective
from jaxrl.train.optimizer import make_optimizer
from jaxrl.weights.store import WeightStore

NAMES = ["smollm2_135m_sft", "smollm2_135m_grpo"]
VARIABLE = "JAXRL_SMOLLM2_GGUF"
PROMPTS = 56


@pytest.fixture
def shape_only(tmp_path):
    """A folder that says what shape SmolLM2-135M has, and holds nothing else."""
    record = published_record(preset("smollm2-135m"))
    (tmp_path / "config.json").write_text(json.dumps(record))
    return str(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_config_with_the_path_given_loads_without_reading_weights(
    name, repo_root, monkeypatch, shape_only
):
    monkeypatch.setenv("SMOLLM2", shape_only)

    config = load_config_file(repo_root / "configs" / f"{name}.py")

    assert config.model.weights == config.data.tokenizer == shape_only
    assert (config.model.n_layers, config.model.d_model) == (30, 576)
    assert config.data.chat
    assert config.eval.size >= 128
    assert (config.sft.steps > 0, config.train.steps > 0) == (
        name.endswith("sft"),
        name.endswith("grpo"),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("given", "shown"), [(None, "models/SmolLM2-135M-Instruct"), ("no/such.gguf", "no/such.gguf")]
)
def test_config_without_the_model_names_the_path_and_what_it_must_be(
    name, given, shown, repo_root, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    if given is None:
        monkeypatch.delenv("SMOLLM2", raising=False)
    else:
        monkeypatch.setenv("SMOLLM2", given)

    with pytest.raises(ConfigError, match=rf"{shown} .*must be .*a GGUF file"):
        load_config_file(repo_root / "configs" / f"{name}.py")


@pytest.fixture
def small(repo_root, monkeypatch, tmp_path):
    """Function (name, section=changes, …) -> that config on the real weights, on less of all."""
    path = os.environ.get(VARIABLE, "")
    if not Path(path).is_file():
        pytest.skip(f"{VARIABLE} does not name the file of SmolLM2-135M-Instruct")
    pytest.importorskip("gguf", reason="the file is quantised")
    pytest.importorskip("jinja2", reason="prompts are asked in a chat")
    pytest.importorskip("reasoning_gym", reason="it makes the questions")
    monkeypatch.setenv("SMOLLM2", path)

    def load(name: str, **changes) -> ExperimentConfig:
        config = load_config_file(repo_root / "configs" / f"{name}.py")
        changes = {
            "eval": {"size": PROMPTS, "every": 0},
            "checkpoint": {"publish_every": 1},
            "observe": {"progress": False, "tensorboard": False, "plots": False},
            # Scoring starts a process, which takes long where the machine is busy.
            "rewards": {"timeout_s": 60.0},
            **changes,
        }
        sections = {
            section: dataclasses.replace(getattr(config, section), **values)
            for section, values in changes.items()
        }
        return dataclasses.replace(config, output_dir=str(tmp_path / name), **sections)

    return load


@pytest.mark.slow
def test_sft_of_the_real_model_lowers_the_loss_and_checkpoints_the_version_it_reached(small):
    config = small("smollm2_135m_sft", sft={"steps": 6, "batch_size": 8, "warmup_steps": 1})

    with SFTTrainer(config, devices=jax.devices()[:1]) as trainer:
        version = trainer.fit()

    run = RunDir(config.output_dir)
    records = read_metrics(run.metrics / "metrics.jsonl")
    losses = [record["sft/loss"] for record in records if "sft/loss" in record]
    assert len(losses) == 6
    # Any of 49152 tokens would cost 10.8 nats; this model has learnt something before.
    assert 0.5 < losses[0] < 8
    assert losses[-1] < 0.7 * losses[0]
    assert version.number == 6
    updates = [r["version"] for r in read_ledger(run.ledger) if r["event"] == "updated"]
    assert updates == [1, 2, 3, 4, 5, 6]
    checkpoints = [r["version"] for r in read_ledger(run.ledger) if r["event"] == "checkpointed"]
    assert checkpoints == [6]


@pytest.mark.slow
def test_grpo_of_the_real_model_starts_where_it_can_learn_and_is_proven_from_disk(small):
    config = small(
        "smollm2_135m_grpo",
        train={"steps": 2, "batch_size": 8, "warmup_steps": 0, "micro_batches": 1},
        rollout={"group_size": 4, "slots": 16},
    )

    with RLTrainer(config, devices=jax.devices()[:1]) as trainer:
        before = trainer.fit()["before"]

    assert before.prompts == PROMPTS
    assert 0.1 <= before.accuracy <= 0.6
    run = RunDir(config.output_dir)
    records = read_ledger(run.ledger)
    digests = published_versions(records)
    assert sorted(digests) == [0, 1, 2]
    assert len(set(digests.values())) == 3
    assert run.updates_with_trajectories() == [0, 1]
    for update in (0, 1):
        groups, used = run.read_trajectories(update)
        trained = [t.sample_id for group in groups for t in group.trajectories]
        assert consumed_samples(records)[update] == trained
        assert used.items() <= digests.items()
    _require_equal_logprobs(config, run)


def _require_equal_logprobs(config: ExperimentConfig, run: RunDir) -> None:
    """The train engine, under the stored versions, gives what the sampler said of each token."""
    parts, train = Parts(config, jax.devices()[:1]), config.train
    objective = grpo_objective(config.algorithm, temperature=config.rollout.temperature)
    engine = TrainEngine(
        parts.model, parts.initial_params(), make_optimizer(train), objective, mesh=parts.mesh
    )
    store = WeightStore(run.weights, read_only=True)
    rows = rows_for(train.batch_size, config.longest_sequence, config.row_length)
    for update in (0, 1):
        groups, used = run.read_trajectories(update)
        batch = collate(groups, rows=rows, row_length=config.row_length)
        for number in used:
            params, _ = store.restore(number, parts.model.abstract, frozen=engine.frozen)
            logp = np.asarray(engine.logprobs(batch, params))
            drawn = batch.loss_mask & (batch.versions == number)
            assert drawn.sum() > 0
            np.testing.assert_allclose(logp[drawn], batch.behavior_logp[drawn], rtol=0, atol=1e-3)

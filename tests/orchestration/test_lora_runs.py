"""Runs that train adapters: resumable, provable from disk, exported as plain weights."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from orchestration.interrupting import fit_until_interrupted

from jaxrl.cli import parsing
from jaxrl.cli.published import load_weights, open_parts
from jaxrl.config import published_model
from jaxrl.errors import CheckpointError, WeightVersionError
from jaxrl.models.lora import merge_adapters, split_frozen
from jaxrl.models.model import build_model, init_params
from jaxrl.models.safetensors import load_params, save_params
from jaxrl.orchestration.ledger import published_versions, read_ledger
from jaxrl.orchestration.rl import RLTrainer
from jaxrl.orchestration.run_dir import RunDir
from jaxrl.orchestration.session import Parts
from jaxrl.weights.store import WeightStore


@pytest.fixture
def lora_config(make_config, tmp_path):
    """Function (folder, section=changes) -> config of a run with adapters on published weights."""
    folder = tmp_path / "published"
    model = build_model(dataclasses.replace(make_config().model, vocab_size=128))
    save_params(folder, model, init_params(model, 5))

    def make(name, **changes):
        adapted = published_model(folder, lora_rank=4, lora_alpha=8.0)
        return make_config(name, model=adapted, **changes)

    return make


def _fit(config) -> str:
    with RLTrainer(config, devices=jax.devices()[:1]) as trainer:
        trainer.fit()
        return trainer.version.digest


def test_run_interrupted_then_resumed_equals_a_straight_one_and_is_proven_from_disk(lora_config):
    straight = _fit(lora_config("straight", algorithm={"kl_coef": 0.1}))
    config = lora_config("stopped", algorithm={"kl_coef": 0.1})
    with RLTrainer(config, devices=jax.devices()[:1]) as trainer:
        fit_until_interrupted(trainer, updates=2)

    assert _fit(config) == straight

    run, parts = RunDir(config.output_dir), Parts(config, jax.devices()[:1])
    store = WeightStore(run.weights, read_only=True)
    digests = published_versions(read_ledger(run.ledger))
    frozen = split_frozen(parts.initial_params())[1]
    for number in store.numbers():
        assert all("_lora/" in name for name in store.stamp(number).tensors)
        _, version = store.restore(number, parts.model.abstract, frozen=frozen)
        assert version.digest == digests[number]
    assert store.numbers() == [4, 5, 6, 7, 8]


def test_run_whose_published_weights_changed_is_not_resumed(lora_config, tmp_path):
    config = lora_config("run", train={"steps": 1})
    _fit(config)
    plain = build_model(dataclasses.replace(config.model, lora_rank=0))
    save_params(tmp_path / "published", plain, init_params(plain, 6))

    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=2))
    with pytest.raises(WeightVersionError, match="with the frozen weights"):
        _fit(longer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_alpha", 64.0),
        pytest.param("lora_rank", 2, marks=pytest.mark.slow),
        pytest.param("lora_targets", ("query",), marks=pytest.mark.slow),
        pytest.param("rope_theta", 7.0, marks=pytest.mark.slow),
    ],
)
def test_run_whose_model_changed_is_not_resumed_and_keeps_its_config(lora_config, field, value):
    config = lora_config("run", sft={"steps": 1}, train={"steps": 0})
    _fit(config)
    before = RunDir(config.output_dir).config.read_bytes()
    model = dataclasses.replace(config.model, **{field: value})
    longer = dataclasses.replace(config.train, steps=2)

    with pytest.raises(CheckpointError, match=rf"was made with model\.{field}=.*the config has"):
        _fit(dataclasses.replace(config, model=model, train=longer))
    assert RunDir(config.output_dir).config.read_bytes() == before


def test_exported_weights_are_the_merged_ones(lora_config, tmp_path):
    config = lora_config("run", train={"steps": 1})
    _fit(config)
    command = [f"--run={config.output_dir}", f"--to={tmp_path / 'out'}"]
    arguments = parsing.parse_arguments(parsing.COMMANDS["convert"], command)
    parts = open_parts(arguments)
    params, version = load_weights(arguments, parts)
    assert version.number == 5

    save_params(tmp_path / "out", parts.model, params)

    plain, merged = merge_adapters(parts.model, params)
    loaded = load_params(tmp_path / "out", plain)
    jax.tree.map(np.testing.assert_array_equal, loaded, merged)
    assert np.abs(merged["layers"]["0"]["mlp"]["up"] - params["layers"]["0"]["mlp"]["up"]).max() > 0

"""Texts over a config: typed, named, validated as a whole."""

from __future__ import annotations

import pytest

from jaxrl.config import DataConfig, ExperimentConfig, ModelConfig, apply_overrides
from jaxrl.errors import ConfigError


@pytest.fixture
def config() -> ExperimentConfig:
    """Defaults, on a reasoning-gym task."""
    data = DataConfig(source="reasoning_gym", task="spell_backward", task_options={"a": 1})
    return ExperimentConfig(model=ModelConfig(), data=data)


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("train.steps", "12", 12),
        ("train.steps", "1_000", 1000),
        ("train.learning_rate", "3e-4", 3e-4),
        ("train.learning_rate", "1", 1.0),
        ("observe.plots", "false", False),
        ("observe.plots", "True", True),
        ("observe.plots", "0", False),
        ("name", "12", "12"),
        ("output_dir", "runs/a=b", "runs/a=b"),
        ("model.remat", "full", "full"),
        ("mesh.data", "8", 8),
        ("rollout.prefill_buckets", "(64, 128)", (64, 128)),
        ("rollout.prefill_buckets", "[64, 128]", (64, 128)),
        ("rollout.prefill_buckets", "64,128", (64, 128)),
        ("rollout.prefill_buckets", "128", (128,)),
        ("rollout.prefill_buckets", "()", ()),
        ("rollout.prefill_buckets", "", ()),
        ("model.lora_targets", "query, value", ("query", "value")),
        ("data.task_options", '{"b": true, "c": [1.5]}', {"b": True, "c": [1.5]}),
        ("data.task_options", "{'b': True, 'c': None}", {"b": True, "c": None}),
        ("data.task_options", "{}", {}),
    ],
)
def test_apply_overrides_text_becomes_a_value_of_the_type(config, path, text, value):
    changed = apply_overrides(config, {path: text})

    for name in path.split("."):
        changed = getattr(changed, name)
    assert changed == value
    assert type(changed) is type(value)


def test_apply_overrides_leaves_the_config_and_other_fields_alone(config):
    changed = apply_overrides(config, {"train.steps": "7"})

    assert config.train.steps == 100
    assert apply_overrides(changed, {"train.steps": "100"}) == config


def test_apply_overrides_together_are_checked_as_a_whole(config):
    both = {"rollout.group_size": "7", "train.batch_size": "21"}

    assert apply_overrides(config, both).train.batch_size == 21
    with pytest.raises(ConfigError, match=r"train\.batch_size=64 must be a multiple of .*=7"):
        apply_overrides(config, {"rollout.group_size": "7"})


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("train.steps", "1.5", "train.steps='1.5' must be an integer"),
        ("train.steps", "", "train.steps='' must be an integer"),
        ("train.steps", "-1", "train.steps=-1 must be between 0 and 2147483647"),
        ("train.learning_rate", "fast", "train.learning_rate='fast' must be a finite number"),
        ("train.learning_rate", "nan", "train.learning_rate='nan' must be a finite number"),
        ("observe.plots", "maybe", "observe.plots='maybe' must be true or false"),
        ("model.remat", "ful", "model.remat='ful' must be one of 'none', 'dots', 'full'; did"),
        ("rollout.prefill_buckets", "64;128", "rollout.prefill_buckets='64;128' must be an int"),
        ("rollout.prefill_buckets", "{}", "rollout.prefill_buckets='{}' must be an integer"),
        ("data.task_options", "a=1", "data.task_options='a=1' must be a mapping"),
        ("data.task_options", "[1]", "data.task_options='[1]' must be a mapping"),
        ("data.source", "jsonl", "data.path='' must be non-empty, because of data.source='jsonl'"),
        ("train.lerning_rate", "1", "train.lerning_rate does not exist; did you mean train.learn"),
        ("trian.steps", "1", "trian does not exist; did you mean train?"),
        ("steps", "1", "steps does not exist; did you mean sft.steps or train.steps?"),
        ("rollout.kl_coef", "1", "rollout.kl_coef does not exist; did you mean algorithm.kl_coef?"),
        ("train.zzz", "1", "train.zzz does not exist; the names are steps, batch_size"),
        ("train.steps.more", "1", "train.steps.more does not exist: train.steps has no fields"),
        ("train", "1", "train is a section: set its fields, for example train.steps"),
        ("", "1", " does not exist"),
    ],
)
def test_apply_overrides_bad_text_or_name_message_names_both(config, path, text, message):
    with pytest.raises(ConfigError) as error:
        apply_overrides(config, {path: text})

    assert message in str(error.value)

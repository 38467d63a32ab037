"""The configuration of a run: defaults, rules between fields, and that importing it is cheap."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from jaxrl.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    MeshConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
)
from jaxrl.config.schema import leaf_fields
from jaxrl.errors import ConfigError

GYM = {"source": "reasoning_gym", "task": "spell_backward"}


def make(**sections) -> ExperimentConfig:
    """A config with defaults for what is not given."""
    return ExperimentConfig(**{"model": ModelConfig(), "data": DataConfig(**GYM), **sections})


def test_defaults_are_a_valid_config():
    config = make()

    assert config.train.batch_size % config.rollout.group_size == 0
    assert config.row_length == config.model.max_length
    assert config.eval_new_tokens == config.rollout.max_new_tokens
    assert config.longest_sequence == 256
    assert config.mesh.sizes() == {
        "data": -1,
        "fsdp": 1,
        "tensor": 1,
        "context": 1,
        "expert": 1,
        "expert_tensor": 1,
    }


def test_import_config_loads_neither_jax_nor_numpy():
    code = "import sys; from jaxrl.config import ExperimentConfig, to_json; print(*sys.modules)"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    assert not {"jax", "flax", "numpy", "ml_collections"} & set(result.stdout.split())


def test_fields_numbers_have_a_rule_and_text_says_what_is_accepted():
    bare = [
        path
        for path, field in leaf_fields(ExperimentConfig)
        if field.kind in (int, float) and field.rule is None
    ]

    assert bare == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: make(train=TrainConfig(batch_size=60)),
            "train.batch_size=60 must be a multiple of rollout.group_size=8",
        ),
        (
            lambda: make(rollout=RolloutConfig(group_size=1)),
            "rollout.group_size=1 must be at least 2",
        ),
        (
            lambda: make(rollout=RolloutConfig(max_new_tokens=400)),
            "rollout.max_new_tokens=400 must be at most 384",
        ),
        (
            lambda: make(eval=EvalConfig(max_new_tokens=385)),
            "eval.max_new_tokens=385 must be at most 384",
        ),
        (
            lambda: make(train=TrainConfig(row_length=255)),
            "train.row_length=255 must be 0 or at least 256",
        ),
        (
            lambda: RolloutConfig(samplers=("10.0.0.2:8000",)),
            "rollout.samplers=('10.0.0.2:8000',) must be addresses such as http://10.0.0.2:8000",
        ),
        (
            lambda: RolloutConfig(samplers=("http://[::1]:8000", "http://[::1]:8000")),
            "each at most once",
        ),
        (
            lambda: make(rollout=RolloutConfig(prefill_buckets=(32, 257))),
            "rollout.prefill_buckets=(32, 257) must be at most 256 each",
        ),
        (lambda: make(eval=EvalConfig(size=201)), "eval.size=201 must be at most data.eval_size="),
        (
            lambda: make(mesh=MeshConfig(tensor=4)),
            "mesh.tensor=4 must be a divisor of model.n_kv_heads=2",
        ),
        (
            lambda: make(mesh=MeshConfig(fsdp=3)),
            "mesh.fsdp=3 must be a divisor of model.d_model=256",
        ),
        (lambda: make(seed=-1), "seed=-1 must be between 0 and"),
        (lambda: make(name=" "), "name=' ' must be non-empty"),
        (lambda: make(train=SFTConfig()), "must be a TrainConfig"),
        (lambda: make(trian=TrainConfig()), "trian does not exist; did you mean train?"),
        (
            lambda: ModelConfig(n_heads=5),
            "model.n_heads=5 must be a multiple of model.n_kv_heads=2",
        ),
        (
            lambda: ModelConfig(rope_scaling={"rope_type": "dynamic"}),
            "of rope_type 'linear' or 'llama3' or 'yarn'",
        ),
        (
            lambda: ModelConfig(rope_scaling={"rope_type": "linear", "factor": -2}),
            "rope_type and positive numbers factor, nothing else",
        ),
        (
            lambda: ModelConfig(rope_scaling={"rope_type": "linear", "factor": 2, "beta": 1}),
            "rope_type and positive numbers factor, nothing else",
        ),
        (lambda: ModelConfig(head_dim=7), "model.head_dim=7 must be even"),
        (lambda: ModelConfig(dtype="fp32"), "model.dtype='fp32' must be one of 'float32', 'bf"),
        (lambda: MeshConfig(fsdp=-1), "mesh.fsdp=-1 must be a number: mesh.data is -1 already"),
        (lambda: MeshConfig(data=0), "mesh.data=0 must be at least 1, or -1"),
        (lambda: DataConfig(), "data.source is required"),
        (lambda: DataConfig(source="reasoning_gym"), "data.task='' must be non-empty"),
        (lambda: DataConfig(source="jsonl"), "data.path='' must be non-empty"),
        (lambda: DataConfig(**GYM, path="x"), "data.path='x' must be empty"),
        (
            lambda: DataConfig(source="jsonl", path="x", task_options={"a": 1}),
            "data.task_options={'a': 1} must be empty",
        ),
        (lambda: DataConfig(**GYM, prompt_template="Q: {0}"), "must be a format string with"),
        (
            lambda: DataConfig(**GYM, system_prompt="Hi"),
            "data.system_prompt='Hi' must be empty, unless data.chat is true",
        ),
        (
            lambda: DataConfig(**GYM, chat_variables={"a": 1}),
            "data.chat_variables={'a': 1} must be empty, unless data.chat is true",
        ),
        (lambda: DataConfig(**GYM, prompt_template="{question"), "must be a format string with"),
        (lambda: DataConfig(**GYM, prompt_template="Q: {}"), "must be a format string with"),
        (lambda: DataConfig(**GYM, prompt_template="Q: {{x}}"), "must be a format string with"),
        (
            lambda: TrainConfig(steps=5, warmup_steps=6),
            "train.warmup_steps=6 must be at most train.steps=5",
        ),
        (
            lambda: SFTConfig(steps=5, warmup_steps=6),
            "sft.warmup_steps=6 must be at most sft.steps=5",
        ),
        (lambda: TrainConfig(learning_rate=0), "train.learning_rate=0.0 must be above 0"),
        (lambda: RolloutConfig(temperature=0.0), "rollout.temperature=0.0 must be above 0"),
        (lambda: RolloutConfig(in_flight="stop"), "one of 'finish', 'continue', 'recompute'"),
        (lambda: RewardConfig(scorer="a b"), "the name of a scorer, or module:function"),
        (lambda: CheckpointConfig(keep=0), "checkpoint.keep=0 must be at least 1"),
    ],
)
def test_construction_broken_rule_message_names_field_value_and_rule(build, message):
    with pytest.raises(ConfigError) as error:
        build()

    assert message in str(error.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: make(train=TrainConfig(row_length=256)),
        lambda: make(rollout=RolloutConfig(prefill_buckets=(64, 256))),
        lambda: make(train=TrainConfig(steps=0), rollout=RolloutConfig(group_size=1)),
        lambda: make(mesh=MeshConfig(data=1, tensor=-1)),
        lambda: make(mesh=MeshConfig(fsdp=8, tensor=2)),
        lambda: DataConfig(**GYM, prompt_template="{{json}} {question} {word[0]!r:>8}"),
        lambda: RewardConfig(scorer="my.module:score"),
        lambda: RolloutConfig(max_staleness=0),
        lambda: TrainConfig(grad_clip=0),
    ],
)
def test_construction_value_at_the_edge_of_a_rule_is_accepted(build):
    build()


def test_replace_of_a_section_checks_the_whole_config():
    config = make()

    with pytest.raises(ConfigError, match=r"train\.batch_size=12"):
        dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=12))

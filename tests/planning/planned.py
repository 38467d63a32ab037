"""A small config for the tests of planning; no weights, tokenizer or data are behind it."""

from __future__ import annotations

import dataclasses

from jaxrl.config import (
    DataConfig,
    ExperimentConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
)

MODEL = {
    "n_layers": 2,
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "mlp_dim": 128,
    "vocab_size": 256,
    "max_length": 64,
}
TRAIN = {"batch_size": 16, "logprob_chunk": 128}


def small_config(**sections) -> ExperimentConfig:
    """`sections`: name -> changed fields, or the number of another field."""
    sections = {name: dict(fields) for name, fields in sections.items()}
    return ExperimentConfig(
        model=ModelConfig(**MODEL | sections.get("model", {})),
        data=DataConfig(
            **{"source": "jsonl", "path": "there is none", "max_prompt_tokens": 32}
            | sections.get("data", {})
        ),
        mesh=MeshConfig(**sections.get("mesh", {})),
        sft=SFTConfig(**sections.get("sft", {})),
        train=TrainConfig(**TRAIN | sections.get("train", {})),
        rollout=RolloutConfig(
            **{"max_new_tokens": 32, "slots": 16, "group_size": 4} | sections.get("rollout", {})
        ),
    )


def with_algorithm(config: ExperimentConfig, **fields) -> ExperimentConfig:
    """`config` with other fields of its objective."""
    return dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, **fields))

"""A run that takes seconds: echoing two letters, a decoder of two layers."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from jaxrl.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    ObserveConfig,
    RewardConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
)


@pytest.fixture
def questions(tmp_path):
    """A jsonl file: the question is two letters, the answer the same two in reverse."""
    path = tmp_path / "questions.jsonl"
    pairs = itertools.product("abcdefg", "abcdefg")
    rows = [{"question": f"{a}{b}=", "answer": f"{b}{a}"} for a, b in pairs]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def make_config(tmp_path, questions):
    """Function (folder, section=changes, …) -> config of a run below tmp_path."""

    def make(folder: str = "run", **changes) -> ExperimentConfig:
        config = ExperimentConfig(
            output_dir=str(tmp_path / folder),
            model=ModelConfig(
                n_layers=2,
                d_model=32,
                n_heads=2,
                n_kv_heads=1,
                head_dim=16,
                mlp_dim=64,
                max_length=16,
            ),
            data=DataConfig(
                source="jsonl",
                path=str(questions),
                train_size=40,
                eval_size=8,
                max_prompt_tokens=8,
            ),
            sft=SFTConfig(steps=4, batch_size=8, learning_rate=3e-3),
            train=TrainConfig(steps=4, batch_size=16, learning_rate=1e-3),
            rollout=RolloutConfig(
                max_staleness=0, group_size=4, max_new_tokens=4, slots=16, steps_per_dispatch=2
            ),
            rewards=RewardConfig(scorer="orchestration_rewards:share", timeout_s=60.0),
            eval=EvalConfig(size=8),
            checkpoint=CheckpointConfig(publish_every=1),
            observe=ObserveConfig(
                progress=False, tensorboard=False, plots=False, compilation_cache="off"
            ),
        )
        sections = {
            name: dataclasses.replace(getattr(config, name), **values)
            if isinstance(values, dict)
            else values
            for name, values in changes.items()
        }
        return dataclasses.replace(config, **sections)

    return make

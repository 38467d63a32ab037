"""The smallest complete run: cold start, asynchronous RL, evaluation; for a first look and tests.

command:   jaxrl train --config=configs/tiny.py
cost:      under a minute on two CPU cores, mostly compilation; no download (extra: `tasks`)
result:    every part of a run has run once, and runs/tiny is complete. Nothing is learnt: the
           rewards stay near 0. For a run that learns, see configs/quickstart.py
"""

from __future__ import annotations

from jaxrl.config import (
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
)


def get_config() -> ExperimentConfig:
    """Two layers of width 32 on words spelt backward."""
    return ExperimentConfig(
        name="tiny",
        output_dir="runs/tiny",
        model=ModelConfig(
            n_layers=2, d_model=32, n_heads=2, n_kv_heads=1, head_dim=16, mlp_dim=64, max_length=128
        ),
        data=DataConfig(
            source="reasoning_gym",
            task="spell_backward",
            task_options={"min_word_len": 3, "max_word_len": 4},
            train_size=64,
            eval_size=8,
            max_prompt_tokens=96,
        ),
        sft=SFTConfig(steps=4, batch_size=16, learning_rate=1e-3),
        train=TrainConfig(steps=4, batch_size=8, learning_rate=1e-4),
        rollout=RolloutConfig(max_staleness=1, group_size=4, max_new_tokens=8, slots=8),
        eval=EvalConfig(size=8),
    )

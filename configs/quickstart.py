"""The main job: supervised cold start, asynchronous GRPO, evaluation on held-out words.

command:   jaxrl train --config=configs/quickstart.py        (make quickstart installs first)
cost:      about 245 CPU-seconds, 3 to 4 minutes on two cores; no download (extra: `tasks`)
result:    held-out accuracy on 256 words, after the cold start and after RL:
           seed 0: 0.254 -> 0.961, seed 1: 0.234 -> 0.965, seed 2: 0.320 -> 0.984
"""

from __future__ import annotations

from jaxrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
)


def get_config() -> ExperimentConfig:
    """Spell words of 3 to 6 letters backward, one character per token."""
    return ExperimentConfig(
        name="quickstart",
        output_dir="runs/quickstart",
        model=ModelConfig(
            n_layers=2,
            d_model=128,
            n_heads=8,
            n_kv_heads=4,
            head_dim=16,
            mlp_dim=512,
            max_length=32,
            # Sequences are short: slow rotations would leave most of a head's width unused.
            rope_theta=100.0,
        ),
        data=DataConfig(
            source="reasoning_gym",
            task="spell_backward",
            task_options={"min_word_len": 3, "max_word_len": 6},
            prompt_template="{word}=",
            train_size=15000,
            eval_size=256,
            max_prompt_tokens=8,
        ),
        # The demonstrations are imperfect: 70% of the answers of more than 4 letters lack the
        # last one. The cold start learns that too; RL has the reward alone to unlearn it.
        sft=SFTConfig(
            steps=300,
            batch_size=64,
            learning_rate=2e-3,
            warmup_steps=10,
            careless=0.7,
            careless_above=4,
        ),
        train=TrainConfig(
            steps=150, batch_size=256, learning_rate=3e-4, warmup_steps=5, b2=0.98, row_length=32
        ),
        algorithm=AlgorithmConfig(clip_high=0.28, behavior_weight_cap=2.0),
        rollout=RolloutConfig(
            max_staleness=1, group_size=8, max_new_tokens=8, slots=128, steps_per_dispatch=4
        ),
        eval=EvalConfig(size=256, every=30),
        checkpoint=CheckpointConfig(every=50),
    )

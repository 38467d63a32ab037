"""GRPO of a published model: SmolLM2-135M-Instruct learns sums of one-digit numbers from reward.

command:   SMOLLM2=PATH jaxrl train --config=configs/smollm2_135m_grpo.py
needs:     PATH, a folder with the files of HuggingFaceTB/SmolLM2-135M-Instruct or a GGUF file of
           it (extra `gguf`); without SMOLLM2 it is models/SmolLM2-135M-Instruct. Extra `tasks`.
           Nothing is downloaded.
cost:      about 14 CPU-minutes: 20 to 25 CPU-seconds for each of 20 updates (4 questions, 8 samples
           each), 30 to 45 for an evaluation, 2 minutes to load and compile; 2.6 GB of memory
           (4.3 GB with train.micro_batches=1). The first update ends after 2 to 3 minutes, 20
           after about 15 on two cores
result:    accuracy on 128 held-out sums, of the Q4_1 file:
           seed 0: 0.352 -> 0.625 after 10 updates, 0.625 after 20 (with train.micro_batches=1)
           seed 1: 0.352 -> 0.648 after 10 updates, not trained further (474 CPU-seconds in all)
           By update 17 the rewards of training reach 0.8 to 1: the questions are few.
           All weights instead (model.lora_rank=0) took 5.9 GB; what they learn was not measured
"""

from __future__ import annotations

import os

from jaxrl.config import (
    AlgorithmConfig,
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
    published_model,
)

MODEL = os.environ.get("SMOLLM2") or "models/SmolLM2-135M-Instruct"


def get_config() -> ExperimentConfig:
    """`1 + 5`, `5 - 9`: 200 questions, of which 128 are held out."""
    return ExperimentConfig(
        name="smollm2_135m_grpo",
        output_dir="runs/smollm2_135m_grpo",
        # Adapters: no moments of 135 million weights, and gradients at two thirds of the cost.
        # Thirty layers, one after the other, would take minutes to compile.
        model=published_model(
            MODEL, max_length=64, scan_layers=True, lora_rank=16, lora_alpha=32.0
        ),
        data=DataConfig(
            source="reasoning_gym",
            task="chain_sum",
            task_options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            train_size=80,
            eval_size=128,
            tokenizer=MODEL,
            max_prompt_tokens=32,
            chat=True,
            system_prompt="Calculate.",
        ),
        train=TrainConfig(
            steps=20,
            batch_size=32,
            learning_rate=5e-4,
            warmup_steps=2,
            micro_batches=4,
            row_length=46,
        ),
        algorithm=AlgorithmConfig(clip_high=0.28, behavior_weight_cap=2.0),
        rollout=RolloutConfig(
            max_staleness=1,
            group_size=8,
            max_new_tokens=14,
            slots=32,
            steps_per_dispatch=4,
            prefill_buckets=(32,),
        ),
        rewards=RewardConfig(scorer="last_number"),
        eval=EvalConfig(size=128, every=10),
    )

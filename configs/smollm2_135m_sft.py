"""Supervised training of a published model: SmolLM2-135M-Instruct learns to say sums alone.

command:   SMOLLM2=PATH jaxrl train --config=configs/smollm2_135m_sft.py
needs:     PATH, a folder with the files of HuggingFaceTB/SmolLM2-135M-Instruct or a GGUF file of
           it (extra `gguf`); without SMOLLM2 it is models/SmolLM2-135M-Instruct. Extra `tasks`.
           Nothing is downloaded.
cost:      about 280 CPU-seconds: 12 for each of 15 updates, 30 to 45 for the evaluation, the rest
           to load and compile; 2.9 GB of memory. 3 to 10 minutes on two cores
result:    accuracy on 128 held-out sums of one-digit numbers, measured once (seed 0, Q4_1 file):
           0.352 -> 0.734. Before, the model explains and often has not answered after 14 tokens.
           To measure the start: --config.sft.steps=0 --config.output_dir=runs/smollm2_start
"""

from __future__ import annotations

import os

from jaxrl.config import (
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    RewardConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
    published_model,
)

MODEL = os.environ.get("SMOLLM2") or "models/SmolLM2-135M-Instruct"


def get_config() -> ExperimentConfig:
    """The answers that it learns are numbers alone: `1 + 5`, `5 - 9`."""
    return ExperimentConfig(
        name="smollm2_135m_sft",
        output_dir="runs/smollm2_135m_sft",
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
        sft=SFTConfig(steps=15, batch_size=16, learning_rate=5e-4, warmup_steps=2),
        train=TrainConfig(steps=0, row_length=46),
        rollout=RolloutConfig(
            max_new_tokens=14, slots=32, steps_per_dispatch=4, prefill_buckets=(32,)
        ),
        rewards=RewardConfig(scorer="last_number"),
        eval=EvalConfig(size=128),
    )

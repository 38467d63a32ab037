"""x"""

from __future__ import annotations

from jaxrl.config import (
    DataConfig,
    ExperimentConfig,
    MeshConfig,
    RolloutConfig,
    TrainConfig,
    preset,
)


def get_config() -> ExperimentConfig:
    """Rows of 4096 tokens, weights over all chips."""
    return ExperimentConfig(
        name="qwen3_8b",
        model=preset("qwen3-8b", max_length=4096, scan_layers=True, remat="full", dtype="bfloat16"),
        data=DataConfig(source="jsonl", path="questions.jsonl", max_prompt_tokens=1024),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=4),
        train=TrainConfig(batch_size=64, micro_batches=2, logprob_chunk=4096),
        rollout=RolloutConfig(max_new_tokens=3072, slots=64, group_size=8),
    )

"""GRPO of the mixture of experts Qwen3-30B-A3B on 64 TPU v5p chips.

command:   jaxrl compile --config=configs/slices/qwen3_30b_a3b_v5p_4x4x4.py --topology=v5p:4x4x4
           jaxrl plan and jaxrl train take the same file; the weights and questions are your own
cost:      the compilation takes minutes on an ordinary machine and needs no TPU
result:    docs/planning.md: memory of each chip, and the estimated time of an update
"""

from __future__ import annotations

from jaxrl.config import (
    DataConfig,
    ExperimentConfig,
    MeshConfig,
    RolloutConfig,
    SamplerMeshConfig,
    TrainConfig,
    preset,
)


def get_config() -> ExperimentConfig:
    """128 trajectories of up to 8192 tokens for each update."""
    return ExperimentConfig(
        name="qwen3_30b_a3b_v5p_4x4x4",
        output_dir="runs/qwen3_30b_a3b_v5p_4x4x4",
        model=preset(
            "qwen3-30b-a3b", max_length=8192, scan_layers=True, remat="full", dtype="bfloat16"
        ),
        data=DataConfig(
            source="jsonl",
            path="questions.jsonl",
            tokenizer="models/Qwen3-30B-A3B/tokenizer.json",
            max_prompt_tokens=1024,
        ),
        mesh=MeshConfig(data=1, fsdp=-1, expert=8),
        sampler_mesh=SamplerMeshConfig(tensor=4),
        train=TrainConfig(batch_size=128, micro_batches=1, logprob_chunk=16384),
        rollout=RolloutConfig(max_new_tokens=7168, slots=128, group_size=8, steps_per_dispatch=32),
    )

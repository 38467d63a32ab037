"""GRPO of Llama-3.1-70B on 128 TPU v5p chips.

command:   jaxrl compile --config=configs/slices/llama31_70b_v5p_4x4x8.py --topology=v5p:4x4x8
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
    """256 trajectories of up to 8192 tokens for each update."""
    return ExperimentConfig(
        name="llama31_70b_v5p_4x4x8",
        output_dir="runs/llama31_70b_v5p_4x4x8",
        model=preset(
            "llama-3.1-70b", max_length=8192, scan_layers=True, remat="full", dtype="bfloat16"
        ),
        data=DataConfig(
            source="jsonl",
            path="questions.jsonl",
            tokenizer="models/Llama-3.1-70B-Instruct/tokenizer.json",
            max_prompt_tokens=1024,
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=2),
        sampler_mesh=SamplerMeshConfig(tensor=4),
        train=TrainConfig(batch_size=256, micro_batches=4, logprob_chunk=16384),
        rollout=RolloutConfig(max_new_tokens=7168, slots=256, group_size=8, steps_per_dispatch=32),
    )

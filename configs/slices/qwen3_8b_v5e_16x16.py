"""GRPO of Qwen3-8B on a whole pod of TPU v5e, 256 chips.

command:   jaxrl compile --config=configs/slices/qwen3_8b_v5e_16x16.py --topology=v5e:16x16
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
    """512 trajectories of up to 4096 tokens for each update."""
    return ExperimentConfig(
        name="qwen3_8b_v5e_16x16",
        output_dir="runs/qwen3_8b_v5e_16x16",
        model=preset("qwen3-8b", max_length=4096, scan_layers=True, remat="full", dtype="bfloat16"),
        data=DataConfig(
            source="jsonl",
            path="questions.jsonl",
            tokenizer="models/Qwen3-8B/tokenizer.json",
            max_prompt_tokens=1024,
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=2),
        sampler_mesh=SamplerMeshConfig(tensor=4),
        train=TrainConfig(batch_size=512, micro_batches=2, logprob_chunk=16384),
        rollout=RolloutConfig(max_new_tokens=3072, slots=512, group_size=8, steps_per_dispatch=32),
    )

"""The whole configuration of a run, and the rules between its sections."""

from __future__ import annotations

from jaxrl.config import rules
from jaxrl.config.meshes import MeshConfig, SamplerMeshConfig
from jaxrl.config.schema import common, demand, required, section
from jaxrl.config.sections import (
    MAX_SEED,
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    ObserveConfig,
    RewardConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
)


@section("")
class ExperimentConfig:
    """Everything that defines a run. Build it in `get_config()` of a config file."""

    model: ModelConfig = required("shape of the model")
    data: DataConfig = required("prompts and answers")
    name: str = common("run", "name of the run in logs and plots", rules.non_empty())
    output_dir: str = common(
        "runs/run", "folder that receives everything the run writes", rules.non_empty()
    )
    seed: int = common(0, "seed of weights, sampling and order", rules.within(0, MAX_SEED))
    mesh: MeshConfig = common(MeshConfig, "division over devices")
    sampler_mesh: SamplerMeshConfig = common(
        SamplerMeshConfig, "division of the sampler's weights over devices"
    )
    sft: SFTConfig = common(SFTConfig, "cold start")
    train: TrainConfig = common(TrainConfig, "RL updates")
    algorithm: AlgorithmConfig = common(AlgorithmConfig, "objective")
    rollout: RolloutConfig = common(RolloutConfig, "sampling")
    rewards: RewardConfig = common(RewardConfig, "scoring")
    eval: EvalConfig = common(EvalConfig, "evaluation")
    checkpoint: CheckpointConfig = common(CheckpointConfig, "saving and resuming")
    observe: ObserveConfig = common(ObserveConfig, "progress, metrics, plots")

    @property
    def eval_new_tokens(self) -> int:
        """Longest completion of an evaluation, in tokens."""
        return self.eval.max_new_tokens or self.rollout.max_new_tokens

    @property
    def longest_sequence(self) -> int:
        """Most tokens that a training sequence can have: prompt and completion."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def row_length(self) -> int:
        """Tokens in a row of the packed training batch."""
        return self.train.row_length or self.model.max_length

    @property
    def longest_sampled(self) -> int:
        """Most tokens of a sampled sequence, in rollouts and evaluations."""
        new = max(self.rollout.max_new_tokens, self.eval_new_tokens)
        return self.data.max_prompt_tokens + new

    @property
    def prompt_buckets(self) -> tuple[int, ...]:
        """Prompt lengths to compile for: those of the config, or powers of two and the longest."""
        longest = self.data.max_prompt_tokens
        powers = tuple(1 << i for i in range(3, 32) if 1 << i < longest)
        return self.rollout.prefill_buckets or (*powers, longest)

    def check(self) -> None:
        """Rules between sections."""
        self._check_groups()
        self._check_lengths()
        self._check_mesh()
        size, most = self.eval.size, self.data.eval_size
        demand(size <= most, "eval.size", size, f"at most data.eval_size={most}")

    def _check_groups(self) -> None:
        batch, group = self.train.batch_size, self.rollout.group_size
        demand(
            batch % group == 0,
            "train.batch_size",
            batch,
            f"a multiple of rollout.group_size={group}: a batch holds whole groups",
        )
        demand(
            group >= 2 or self.train.steps == 0,
            "rollout.group_size",
            group,
            "at least 2: advantages compare the samples of one prompt",
        )

    def _check_lengths(self) -> None:
        prompt, longest = self.data.max_prompt_tokens, self.model.max_length
        completions = {
            "rollout.max_new_tokens": self.rollout.max_new_tokens,
            "eval.max_new_tokens": self.eval_new_tokens,
        }
        for name, new in completions.items():
            rule = f"at most {longest - prompt} = model.max_length - data.max_prompt_tokens"
            demand(prompt + new <= longest, name, new, f"{rule} ({longest} - {prompt})")
        needed = self.longest_sequence
        demand(
            self.row_length >= needed,
            "train.row_length",
            self.train.row_length,
            f"0 or at least {needed} = data.max_prompt_tokens + rollout.max_new_tokens",
        )
        buckets, sampled = self.rollout.prefill_buckets, prompt + max(completions.values())
        demand(
            not buckets or buckets[-1] <= sampled,
            "rollout.prefill_buckets",
            buckets,
            f"at most {sampled} each: data.max_prompt_tokens and the longest completion",
        )

    def _check_mesh(self) -> None:
        model, mesh = self.model, self.mesh
        for axis, name in (
            ("tensor", "n_heads"),
            ("tensor", "n_kv_heads"),
            ("tensor", "mlp_dim"),
            ("fsdp", "d_model"),
        ):
            parts, size = getattr(mesh, axis), getattr(model, name)
            # -1 is known only when the devices are; sharding checks it then.
            rule = f"a divisor of model.{name}={size}"
            demand(parts < 1 or size % parts == 0, f"mesh.{axis}", parts, rule)

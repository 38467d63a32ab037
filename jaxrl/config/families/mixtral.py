"""Mixtral: Llama with a few large experts in every layer."""

from __future__ import annotations

from jaxrl.config.families.family import ATTENTION, NORMS, Family, Record, whole

EXPERTS = {
    "mlp/router": "block_sparse_moe.gate.weight",
    "mlp/gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "mlp/up": "block_sparse_moe.experts.{expert}.w3.weight",
    "mlp/down": "block_sparse_moe.experts.{expert}.w2.weight",
}


def _read(record: Record) -> dict[str, int]:
    return {"sliding_window": whole(record, "sliding_window", 0)}


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    tensors={**NORMS, **ATTENTION, **EXPERTS},
    keys={
        "intermediate_size": "mlp_dim",
        "num_local_experts": "n_experts",
        "num_experts_per_tok": "experts_per_token",
    },
    absent={"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    only={"hidden_act": ("silu",)},
    read=_read,
    write=lambda config: {"sliding_window": config.sliding_window or None},
)

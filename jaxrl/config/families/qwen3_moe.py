"""Qwen3-MoE: Qwen3 with many small experts in every layer."""

from __future__ import annotations

from jaxrl.config.families.family import ATTENTION, HEAD_NORMS, NORMS, Family, Record
from jaxrl.errors import ConfigError

EXPERTS = {
    "mlp/router": "mlp.gate.weight",
    "mlp/gate": "mlp.experts.{expert}.gate_proj.weight",
    "mlp/up": "mlp.experts.{expert}.up_proj.weight",
    "mlp/down": "mlp.experts.{expert}.down_proj.weight",
}


def _read(record: Record) -> dict[str, int]:
    # Files written by transformers 5 use Mixtral's name.
    experts = record.get("num_experts", record.get("num_local_experts"))
    if experts is None:
        raise ConfigError("has no num_experts")
    return {"n_experts": experts}


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    tensors={**NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS},
    fields={"qk_norm": True},
    keys={
        "moe_intermediate_size": "mlp_dim",
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "normalize_experts",
    },
    absent={"norm_topk_prob": False, "num_experts_per_tok": 8},
    only={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        # Every layer has experts.
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
    read=_read,
    write=lambda config: {"num_experts": config.n_experts},
)

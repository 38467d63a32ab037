"""Qwen3, dense: Llama with normed queries and keys."""

from __future__ import annotations

from jaxrl.config.families.family import ATTENTION, HEAD_NORMS, MLP, NORMS, Family

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    tensors={**NORMS, **ATTENTION, **HEAD_NORMS, **MLP},
    fields={"qk_norm": True},
    only={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
)

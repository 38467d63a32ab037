"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from __future__ import annotations

from jaxrl.config.families.family import ATTENTION, BIASES, MLP, NORMS, Family

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    tensors={**NORMS, **ATTENTION, **BIASES, **MLP},
    fields={"qkv_bias": True},
    only={"hidden_act": ("silu",), "use_sliding_window": (False,)},
)

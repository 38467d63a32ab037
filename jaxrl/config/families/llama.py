"""Llama 3.x, and SmolLM2, which is one."""

from __future__ import annotations

from jaxrl.config.families.family import ATTENTION, MLP, NORMS, Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    tensors={**NORMS, **ATTENTION, **MLP},
    only={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
)

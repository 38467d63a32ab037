"""Gemma 2: norms around both parts of a layer, soft caps, a window in every other layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxrl.config.families.family import ATTENTION, MLP, Family, Record, number, read_windows
from jaxrl.config.families.family import layer_types as kinds_of_layers
from jaxrl.errors import ConfigError

if TYPE_CHECKING:
    from jaxrl.config.sections import ModelConfig

FOUR_NORMS = {
    "attention_norm/scale": "input_layernorm.weight",
    "attention_post_norm/scale": "post_attention_layernorm.weight",
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "mlp_post_norm/scale": "post_feedforward_layernorm.weight",
}
GEMMA = {
    "activation": "gelu",
    "norm_offset": True,
    "post_norms": True,
    "scale_embedding": True,
}
"""What all Gemmas share."""

ONLY = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False, None),
}
ABSENT = {"tie_word_embeddings": True, "head_dim": 256}


def read_scales(record: Record, attention_cap: float, logits_cap: float) -> dict[str, float]:
    """The fields of scores and logits; the caps are those of files that do not say."""
    scale = number(record, "query_pre_attn_scalar", 256.0)
    if scale <= 0:
        value = record["query_pre_attn_scalar"]
        raise ConfigError(f"query_pre_attn_scalar={value!r} must be above 0")
    return {
        # The usual scale is written as 0, whatever the head's width.
        "query_scale": 0.0 if scale == record["head_dim"] else scale,
        "attention_softcap": number(record, "attn_logit_softcapping", attention_cap),
        "logits_softcap": number(record, "final_logit_softcapping", logits_cap),
    }


def write_scales(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_scales`, and the windows."""
    types = kinds_of_layers(config.n_layers, config.global_every if config.sliding_window else 1)
    scale = config.query_scale or float(config.head_dim)
    return {
        "query_pre_attn_scalar": int(scale) if scale.is_integer() else scale,
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logits_softcap or None,
        "sliding_window": config.sliding_window or None,
        "layer_types": types,
    }


def _read(record: Record) -> dict[str, Any]:
    windows = read_windows({"sliding_window": 4096, **record}, pattern=2)
    return {**read_scales(record, 50.0, 30.0), **windows}


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    tensors={**FOUR_NORMS, **ATTENTION, **MLP},
    fields=GEMMA,
    absent=ABSENT,
    only=ONLY,
    read=_read,
    write=write_scales,
)

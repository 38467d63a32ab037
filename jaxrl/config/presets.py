"""Shapes of published models by name, with the numbers of their own config.json files."""

from __future__ import annotations

from typing import Any

from jaxrl.config import kinds
from jaxrl.config.sections import ModelConfig
from jaxrl.errors import ConfigError

_SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "mlp_dim")


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {
        "vocab_size": 128256,
        "max_length": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "norm_eps": 1e-5,
    }


_SMOL = {"vocab_size": 49152, "max_length": 8192, "rope_theta": 100000.0, "norm_eps": 1e-5}
_QWEN2 = {"vocab_size": 151936, "max_length": 32768, "rope_theta": 1e6, "qkv_bias": True}
_QWEN3 = {"vocab_size": 151936, "max_length": 40960, "rope_theta": 1e6, "qk_norm": True}
_UNTIED = {"tie_embeddings": False}
_QWEN3_MOE = {**_QWEN3, **_UNTIED, "n_experts": 128, "experts_per_token": 8}
_MIXTRAL = {
    "vocab_size": 32000, "max_length": 32768, "rope_theta": 1e6, "norm_eps": 1e-5, "n_experts": 8,
    **_UNTIED,
}  # fmt: skip
_GEMMA = {
    "activation": "gelu", "norm_offset": True, "post_norms": True, "scale_embedding": True,
}  # fmt: skip
_GEMMA2 = {
    **_GEMMA, "vocab_size": 256000, "max_length": 8192, "attention_softcap": 50.0,
    "logits_softcap": 30.0, "sliding_window": 4096, "global_every": 2,
}  # fmt: skip
_GEMMA3 = {
    **_GEMMA, "qk_norm": True, "vocab_size": 262144, "max_length": 32768, "rope_theta": 1e6,
    "local_rope_theta": 1e4, "sliding_window": 512, "global_every": 6,
}  # fmt: skip

_PRESETS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "smollm2-135m": ((30, 576, 9, 3, 64, 1536), _SMOL),
    "smollm2-360m": ((32, 960, 15, 5, 64, 2560), _SMOL),
    "smollm2-1.7b": ((24, 2048, 32, 32, 64, 8192), {**_SMOL, "rope_theta": 130000.0}),
    "llama-3.2-1b": ((16, 2048, 32, 8, 64, 8192), _llama3(32.0)),
    "llama-3.2-3b": ((28, 3072, 24, 8, 128, 8192), _llama3(32.0)),
    "llama-3.1-8b": ((32, 4096, 32, 8, 128, 14336), {**_llama3(8.0), **_UNTIED}),
    "llama-3.1-70b": ((80, 8192, 64, 8, 128, 28672), {**_llama3(8.0), **_UNTIED}),
    "qwen2.5-0.5b": ((24, 896, 14, 2, 64, 4864), _QWEN2),
    "qwen2.5-1.5b": ((28, 1536, 12, 2, 128, 8960), _QWEN2),
    "qwen2.5-3b": ((36, 2048, 16, 2, 128, 11008), _QWEN2),
    "qwen2.5-7b": ((28, 3584, 28, 4, 128, 18944), {**_QWEN2, **_UNTIED, "vocab_size": 152064}),
    "qwen3-0.6b": ((28, 1024, 16, 8, 128, 3072), _QWEN3),
    "qwen3-1.7b": ((28, 2048, 16, 8, 128, 6144), _QWEN3),
    "qwen3-4b": ((36, 2560, 32, 8, 128, 9728), _QWEN3),
    "qwen3-8b": ((36, 4096, 32, 8, 128, 12288), {**_QWEN3, **_UNTIED}),
    "qwen3-14b": ((40, 5120, 40, 8, 128, 17408), {**_QWEN3, **_UNTIED}),
    "qwen3-32b": ((64, 5120, 64, 8, 128, 25600), {**_QWEN3, **_UNTIED}),
    "qwen3-30b-a3b": ((48, 2048, 32, 4, 128, 768), _QWEN3_MOE),
    "qwen3-235b-a22b": ((94, 4096, 64, 4, 128, 1536), _QWEN3_MOE),
    "mixtral-8x7b": ((32, 4096, 32, 8, 128, 14336), _MIXTRAL),
    "mixtral-8x22b": ((56, 6144, 48, 8, 128, 16384), {**_MIXTRAL, "max_length": 65536}),
    "gemma-2-2b": ((26, 2304, 8, 4, 256, 9216), _GEMMA2),
    "gemma-2-9b": ((42, 3584, 16, 8, 256, 14336), _GEMMA2),
    "gemma-2-27b": ((46, 4608, 32, 16, 128, 36864), {**_GEMMA2, "query_scale": 144.0}),
    "gemma-3-270m": ((18, 640, 4, 1, 256, 2048), _GEMMA3),
    "gemma-3-1b": ((26, 1152, 4, 1, 256, 6912), _GEMMA3),
}

PRESETS = tuple(_PRESETS)
"""The names that `preset` knows."""


def preset(name: str, **changes: Any) -> ModelConfig:
    """The shape of a published model, with `changes` to single fields; weights are not included.

    >>> preset("qwen3-0.6b", max_length=1024).d_model
    1024

    Raises `ConfigError` for an unknown name.
    """
    if name not in _PRESETS:
        hint = kinds.did_you_mean(name, PRESETS) or f"; there are {', '.join(PRESETS)}"
        raise ConfigError(f"there is no preset {name!r}{hint}")
    sizes, rest = _PRESETS[name]
    return ModelConfig(**{**dict(zip(_SIZES, sizes, strict=True)), **rest, **changes})

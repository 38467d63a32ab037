"""Models in GGUF files: the metadata of a file to `ModelConfig`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from jaxrl.config.families.llama import LLAMA
from jaxrl.config.families.qwen2 import QWEN2
from jaxrl.config.families.qwen3 import QWEN3
from jaxrl.config.gguf_header import GgufHeader, read_header
from jaxrl.config.sections import ModelConfig
from jaxrl.errors import ConfigError

_FAMILIES = {family.model_type: family.fields for family in (LLAMA, QWEN2, QWEN3)}
"""`general.architecture` -> what the family fixes."""

_ONLY = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "embedding_scale": 0,
    "residual_scale": 0,
    "logit_scale": 0,
    "pooling_type": 0,
}
"""Key behind the architecture -> the one value that the decoder can compute, also when absent."""

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor by which files of Llama 3 say how positions are scaled: a divisor for each frequency."""


def gguf_model(path: str | os.PathLike[str], **changes: Any) -> ModelConfig:
    """The shape of the model in the GGUF file `path`, with `changes` to single fields.

    `weights` is set to the file. Raises `ConfigError` for a file that is damaged or whose sizes
    are not those of its tensors, and for an architecture or feature that the decoder does not
    compute.
    """
    header = read_header(path)
    family = header.metadata.get("general.architecture")
    if not isinstance(family, str) or family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ConfigError(f"{path}: general.architecture={family!r} must be one of: {known}")
    if (parts := header.metadata.get("split.count", 0)) not in (0, 1):
        raise ConfigError(f"{path}: is one of {parts} parts; merge them (llama-gguf-split --merge)")
    values = _Values(header, family)
    for key, allowed in _ONLY.items():
        if (value := values.get(key, allowed)) != allowed:
            raise ConfigError(f"{path}: {family}.{key}={value!r} must be {allowed!r}")
    fields = {**_sizes(values), **_rope(values), **_FAMILIES[family]}
    config = ModelConfig(**{**fields, "weights": os.fspath(path), **changes})
    # A window that no sequence outgrows changes nothing.
    if values.get("attention.sliding_window", 0) != 0:
        window = values.whole("attention.sliding_window")
        if window < config.max_length:
            rule = f"at least model.max_length={config.max_length}"
            values.refuse("attention.sliding_window", str(window), rule)
    return config


class _Values:
    """Metadata of one architecture by the rest of their keys, with their types checked."""

    def __init__(self, header: GgufHeader, family: str):
        self.header, self._family = header, family

    def get(self, key: str, default: Any = None) -> Any:
        """The number or text of `key`."""
        value = self.header.metadata.get(f"{self._family}.{key}", default)
        if isinstance(value, list | np.ndarray):
            self.refuse(key, f"a list of {len(value)}", "one value for all layers")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"{self.header.path}: has no {self._family}.{key}")
        if type(value) is not int or value < 1:
            self.refuse(key, repr(value), "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"{self.header.path}: has no {self._family}.{key}")
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.refuse(key, repr(value), "a positive number")
        return float(value)

    def refuse(self, key: str, value: str, rule: str) -> None:
        """Raise `ConfigError`."""
        raise ConfigError(f"{self.header.path}: {self._family}.{key} is {value}, must be {rule}")


def _sizes(values: _Values) -> dict[str, Any]:
    """The sizes that the metadata give, which must be those of the tensors."""
    tensors = values.header.tensors
    heads, width = values.whole("attention.head_count"), values.whole("embedding_length")
    table = tensors.get("token_embd.weight")
    tokens = values.header.metadata.get("tokenizer.ggml.tokens", ())
    head_dim = values.whole("attention.key_length", max(width // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := values.whole(key, head_dim)) != head_dim:
            values.refuse(key, str(other), f"{head_dim}, the width of a head")
    sizes = {
        "n_layers": values.whole("block_count"),
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": values.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "mlp_dim": values.whole("feed_forward_length"),
        # Tables are often padded beyond the tokens.
        "vocab_size": table.shape[0] if table else len(tokens),
        "max_length": values.whole("context_length"),
        "norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "tie_embeddings": "output.weight" not in tensors,
    }
    _check_sizes(values.header, sizes)
    return sizes


def _check_sizes(header: GgufHeader, sizes: dict[str, Any]) -> None:
    """Damaged sizes must not reach the model: making it for a billion layers takes for ever."""
    width, heads, kv_heads = sizes["d_model"], sizes["n_heads"], sizes["n_kv_heads"]
    shapes = {
        "token_embd.weight": (sizes["vocab_size"], width),
        "blk.0.attn_q.weight": (heads * sizes["head_dim"], width),
        "blk.0.attn_k.weight": (kv_heads * sizes["head_dim"], width),
        "blk.0.ffn_gate.weight": (sizes["mlp_dim"], width),
    }
    for name, shape in shapes.items():
        if name not in header.tensors:
            raise ConfigError(f"{header.path}: has no tensor {name!r}")
        if (found := header.tensors[name].shape) != shape:
            rule = f"the metadata say {list(shape)}"
            raise ConfigError(f"{header.path}: {name!r} is {list(found)}, {rule}")
    layers = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if len(layers) != sizes["n_layers"]:
        rule = f"block_count is {sizes['n_layers']}"
        raise ConfigError(f"{header.path}: has tensors of {len(layers)} layers, but {rule}")


def _rope(values: _Values) -> dict[str, Any]:
    """Base and scaling of the rotary positions."""
    factor = values.number("rope.scaling.factor", values.get("rope.scale_linear", 1.0))
    # Older files give the factor without a kind.
    kind = values.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind not in ("none", "linear"):
        values.refuse("rope.scaling.type", repr(kind), "'none' or 'linear'")
    scaling: dict[str, Any] = {"rope_type": "linear", "factor": factor} if kind == "linear" else {}
    if ROPE_FACTORS in values.header.tensors:
        if scaling:
            values.refuse("rope.scaling.type", repr(kind), f"'none' beside {ROPE_FACTORS!r}")
        scaling = _llama3(values)
    return {"rope_theta": values.number("rope.freq_base", 10000.0), "rope_scaling": scaling}


def _llama3(values: _Values) -> dict[str, Any]:
    """The scaling behind `ROPE_FACTORS`. Only the largest divisor, the factor, can be read off;
    the others are those of every Llama 3. Loading compares all divisors with these numbers."""
    factor = float(rope_factors(values.header).max())
    if factor == 1.0:
        return {}
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": values.whole(
            "rope.scaling.original_context_length", 8192
        ),
    }


def rope_factors(header: GgufHeader) -> np.ndarray:
    """The divisors of the rotary frequencies, float32 [H/2]. Raises `ConfigError`."""
    tensor = header.tensors[ROPE_FACTORS]
    if tensor.kind != "F32" or len(tensor.shape) != 1:
        found = f"{tensor.kind} {list(tensor.shape)}"
        raise ConfigError(f"{header.path}: {ROPE_FACTORS!r} is {found}, must be a list of F32")
    try:
        factors = np.fromfile(header.path, "<f4", tensor.shape[0], offset=tensor.start)
    except OSError as error:
        raise ConfigError(f"cannot read {header.path}: {error}") from None
    if len(factors) != tensor.shape[0] or not (np.isfinite(factors) & (factors > 0)).all():
        raise ConfigError(f"{header.path}: {ROPE_FACTORS!r} must hold positive numbers")
    return factors

"""Published models: the `config.json` of a Hugging Face folder to `ModelConfig`, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.config.gguf import gguf_model
from jaxrl.config.gguf_header import is_gguf
from jaxrl.config.sections import ModelConfig
from jaxrl.config.serialize import read_text
from jaxrl.errors import ConfigError

_FAMILIES = {
    "llama": {"qk_norm": False, "qkv_bias": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "qwen3": {"qk_norm": True, "qkv_bias": False},
}
"""`model_type` -> what the family fixes. SmolLM2 is a llama, Qwen2.5 a qwen2."""

_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}
"""Key -> the values that the decoder can compute; an absent key counts as the last."""

_NAMES = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_length",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tie_embeddings",
}


def published_model(folder: str | os.PathLike[str], **changes: Any) -> ModelConfig:
    """The shape of the model in `folder`, from its config.json, with `changes` to single fields.

    >>> published_model("SmolLM2-135M", max_length=512)  # doctest: +SKIP

    `folder` may also be a GGUF file (its name ends in .gguf). `weights` is set to the folder or
    file, so that a run starts from them. Raises `ConfigError` for a family or a feature that the
    decoder does not compute.
    """
    if is_gguf(folder):
        return gguf_model(folder, **changes)
    path = Path(folder) / "config.json"
    record = _read(path)
    family = record.get("model_type")
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ConfigError(f"{path}: model_type={family!r} must be one of: {known}")
    for key, allowed in _ONLY.items():
        if (value := record.get(key, allowed[-1])) not in allowed:
            raise ConfigError(f"{path}: {key}={value!r} must be {allowed[0]!r}")
    # null stands for "as usual", like an absent key.
    record = {key: value for key, value in record.items() if value is not None}
    theta, scaling = _rope(record, path)
    record = {**_defaults(record, path), **record, "rope_theta": theta}
    fields = {ours: record[theirs] for theirs, ours in _NAMES.items()} | {"rope_scaling": scaling}
    return ModelConfig(**{**fields, **_FAMILIES[family], "weights": os.fspath(folder), **changes})


def published_record(config: ModelConfig) -> dict[str, Any]:
    """What the config.json of an exported model holds; `published_model` reads it back.

    Raises `ConfigError` for a model that is of no published family.
    """
    fixed = {"qk_norm": config.qk_norm, "qkv_bias": config.qkv_bias}
    families = [name for name, values in _FAMILIES.items() if values == fixed]
    if not families:
        raise ConfigError(f"no published family has {fixed}: the model cannot be exported")
    return {
        "architectures": [f"{families[0].capitalize()}ForCausalLM"],
        "model_type": families[0],
        "rope_scaling": dict(config.rope_scaling) or None,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": config.param_dtype,
        **{theirs: getattr(config, ours) for theirs, ours in _NAMES.items()},
    }


def _read(path: Path) -> Mapping[str, Any]:
    try:
        record = json.loads(read_text(path))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return record


def _defaults(record: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Values that older files leave out, after checking those that none may."""
    optional = {"num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings"}
    if missing := sorted(set(_NAMES) - optional - set(record)):
        raise ConfigError(f"{path}: has no {', '.join(missing)}")
    heads, width = record["num_attention_heads"], record["hidden_size"]
    for key, value in (("num_attention_heads", heads), ("hidden_size", width)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{path}: {key}={value!r} must be a positive integer")
    return {
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "tie_word_embeddings": False,
    }


def _rope(record: Mapping[str, Any], path: Path) -> tuple[float, dict[str, Any]]:
    """Base and scaling of the rotary positions, in the spelling of transformers 4 or 5."""
    rope = record.get("rope_parameters") or record.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{path}: rope_parameters={rope!r} must be an object")
    rope = dict(rope)
    theta = rope.pop("rope_theta", record.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ConfigError(f"{path}: rope_theta={theta!r} must be a number")
    theta = float(theta)
    # Files of older versions say `type`; some say both.
    old_kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_kind)
    if kind == "default":
        return theta, {}
    if kind not in ("linear", "llama3"):
        kinds = "'default', 'linear' or 'llama3'"
        raise ConfigError(f"{path}: rope_type={kind!r} must be {kinds}")
    return theta, {"rope_type": kind, **rope}

"""Published models: the `config.json` of a Hugging Face folder to `ModelConfig`, and back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.config.families.family import (
    Family,
    Record,
    check_layer_types,
    check_no_windows,
    check_rotated,
    read_rope,
)
from jaxrl.config.families.gemma2 import GEMMA2
from jaxrl.config.families.gemma3 import GEMMA3
from jaxrl.config.families.llama import LLAMA
from jaxrl.config.families.mixtral import MIXTRAL
from jaxrl.config.families.qwen2 import QWEN2
from jaxrl.config.families.qwen3 import QWEN3
from jaxrl.config.families.qwen3_moe import QWEN3_MOE
from jaxrl.config.gguf import gguf_model
from jaxrl.config.gguf_header import is_gguf
from jaxrl.config.sections import ModelConfig
from jaxrl.config.serialize import read_text
from jaxrl.errors import ConfigError

FAMILIES = {
    family.model_type: family
    for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, GEMMA2, GEMMA3)
}
"""`model_type` -> family."""

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
"""Keys that all families have."""

_MAY_BE_ABSENT = {"num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings"}
_OUR_OWN = {
    "weights", "lora_rank", "lora_alpha", "lora_targets", "scan_layers", "remat", "dtype",
    "param_dtype",
}  # fmt: skip
"""Fields that are no property of a published model."""


def published_model(folder: str | os.PathLike[str], **changes: Any) -> ModelConfig:
    """The shape of the model in `folder`, from its config.json, with `changes` to single fields.

    >>> published_model("SmolLM2-135M", max_length=512)  # doctest: +SKIP

    `folder` may also be a GGUF file (its name ends in .gguf). `weights` is set to the folder or
    file, so that a run starts from them. Raises `ConfigError` for a family or a feature that the
    decoder does not compute.
    """
    if is_gguf(folder):
        return gguf_model(folder, **changes)
    if not Path(folder).exists():
        kinds = "a folder as of Hugging Face or a GGUF file; nothing is downloaded"
        raise ConfigError(f"{os.fspath(folder)} does not exist: it must be {kinds}")
    path = Path(folder) / "config.json"
    record = _read(path)
    try:
        fields = _fields(_family(record), record)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return ModelConfig(**{**fields, "weights": os.fspath(folder), **changes})


def published_record(config: ModelConfig) -> dict[str, Any]:
    """What the config.json of an exported model holds; `published_model` reads it back.

    Raises `ConfigError` for a model that is of no published family.
    """
    return _record(family_of(config), config)


def family_of(config: ModelConfig) -> Family:
    """The family whose config.json can say all that `config` says about the model.

    Raises `ConfigError` if there is none.
    """
    unlike: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        again = ModelConfig(**_fields(family, _record(family, config)))
        names = (f.name for f in dataclasses.fields(config) if f.name not in _OUR_OWN)
        other = [name for name in names if getattr(again, name) != getattr(config, name)]
        if not other:
            return family
        unlike[family.model_type] = other
    nearest = min(unlike, key=lambda name: len(unlike[name]))
    values = ", ".join(f"model.{name}={getattr(config, name)!r}" for name in unlike[nearest])
    raise ConfigError(f"no published family has this shape; {nearest} is without {values}")


def _fields(family: Family, record: Record) -> dict[str, Any]:
    """Fields of `ModelConfig` out of a config.json. Raises `ConfigError`."""
    for key, allowed in {**family.only, "quantization_config": (None,)}.items():
        value = record.get(key)
        # null stands for "as usual", like an absent key.
        if value is not None and value not in allowed:
            raise ConfigError(f"{key}={value!r} must be {allowed[0]!r}")
    # So that a family reads null as "none" where it means that, all else sees absent keys.
    given = {key: value for key, value in record.items() if value is not None}
    given = {**_defaults(family, given), **given}
    check_rotated(given)
    check_layer_types(given)
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    kinds = isinstance(rope, Mapping) and "full_attention" in rope
    theta, scaling = read_rope({} if kinds else rope, given["rope_theta"])
    names = _names(family)
    shared = {ours: given[theirs] for theirs, ours in names.items() if theirs in given}
    shared |= {"rope_theta": theta, "rope_scaling": scaling}
    fields = {**shared, **family.fields, **family.read({**given, **_nulls(record)})}
    if not fields.get("sliding_window", 0):
        check_no_windows(given)
    return fields


def _record(family: Family, config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model of the family."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "rope_scaling": dict(config.rope_scaling) or None,
        "torch_dtype": config.param_dtype,
        **{key: allowed[0] for key, allowed in family.only.items()},
        **{theirs: getattr(config, ours) for theirs, ours in _names(family).items()},
        **family.write(config),
    }


def _names(family: Family) -> dict[str, str]:
    """Key -> field; a family's own key for a field takes the place of the usual one."""
    own = set(family.keys.values())
    usual = {theirs: ours for theirs, ours in _NAMES.items() if ours not in own}
    return {**usual, **family.keys}


def _family(record: Record) -> Family:
    name = record.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"model_type={name!r} must be one of: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _nulls(record: Record) -> dict[str, None]:
    return {key: None for key, value in record.items() if value is None and key != "head_dim"}


def _read(path: Path) -> Mapping[str, Any]:
    # Opening a pipe would wait for a writer for ever.
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: must be a file")
    try:
        record = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return record


def _defaults(family: Family, record: Record) -> dict[str, Any]:
    """Values that files leave out, after checking those that none may."""
    optional = _MAY_BE_ABSENT | set(family.absent)
    if missing := sorted(set(_names(family)) - optional - set(record)):
        raise ConfigError(f"has no {', '.join(missing)}")
    heads, width = record["num_attention_heads"], record["hidden_size"]
    for key, value in (("num_attention_heads", heads), ("hidden_size", width)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{key}={value!r} must be a positive integer")
    return {
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        **family.absent,
    }

"""What a family of published models is: how its config.json and its tensors spell our model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxrl.errors import ConfigError

if TYPE_CHECKING:
    from jaxrl.config.sections import ModelConfig

Record = Mapping[str, Any]
"""The content of a config.json."""

ATTENTION = {
    "attention/query": "self_attn.q_proj.weight",
    "attention/key": "self_attn.k_proj.weight",
    "attention/value": "self_attn.v_proj.weight",
    "attention/out": "self_attn.o_proj.weight",
}
BIASES = {
    "attention/query_bias": "self_attn.q_proj.bias",
    "attention/key_bias": "self_attn.k_proj.bias",
    "attention/value_bias": "self_attn.v_proj.bias",
}
HEAD_NORMS = {
    "attention/query_norm/scale": "self_attn.q_norm.weight",
    "attention/key_norm/scale": "self_attn.k_norm.weight",
}
NORMS = {
    "attention_norm/scale": "input_layernorm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
}
MLP = {
    "mlp/gate": "mlp.gate_proj.weight",
    "mlp/up": "mlp.up_proj.weight",
    "mlp/down": "mlp.down_proj.weight",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    model_type, architecture  its names in config.json
    tensors  path of a weight within a layer -> its published name there; "{expert}" where every
        expert has a tensor of its own
    fields   values of `ModelConfig` that all members share, where they are not the defaults
    keys     config.json key -> field of `ModelConfig`, besides those that all families have
    absent   values of keys that files leave out
    only     key -> values that the decoder computes; an absent key counts as the last
    read     further fields out of a config.json; raises `ConfigError`
    write    further keys of a config.json
    """

    model_type: str
    architecture: str
    tensors: Mapping[str, str]
    fields: Record = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    absent: Record = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    read: Callable[[Record], dict[str, Any]] = lambda record: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}


def number(record: Record, key: str, default: float) -> float:
    """The number at `key`; an absent key is `default`, null is 0: "none"."""
    value = record.get(key, default)
    value = 0.0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{key}={value!r:.60} must be a finite number") from None


def whole(record: Record, key: str, default: int) -> int:
    """The whole number at `key`; an absent key is `default`, null is 0: "none"."""
    value = number(record, key, default)
    if not value.is_integer():
        raise ConfigError(f"{key}={record[key]!r} must be a whole number")
    return int(value)


def read_rope(rope: Any, theta: Any) -> tuple[float, dict[str, Any]]:
    """(base, `ModelConfig.rope_scaling`) of a record of rotary positions.

    `theta` is the base if the record has none; the spellings of transformers 4 and 5 are known.
    """
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters={rope!r} must be an object")
    rope = {key: value for key, value in rope.items() if value is not None}
    check_rotated(rope)
    theta = number(rope, "rope_theta", number({"rope_theta": theta}, "rope_theta", 0.0))
    rope.pop("rope_theta", None)
    rope.pop(_ROTATED, None)
    # Files of older versions say `type`; some say both.
    old_kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_kind)
    if kind == "default":
        return theta, {}
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"rope_type={kind!r} must be 'default', 'linear', 'llama3' or 'yarn'")
    return theta, {"rope_type": kind, **rope}


def check_rotated(record: Record) -> None:
    """Raise `ConfigError` unless the whole width of a head takes part in the rotation."""
    if (share := number(record, _ROTATED, 1.0)) != 1.0:
        raise ConfigError(f"{_ROTATED}={share!r} must be 1.0")


def read_windows(record: Record, pattern: int) -> dict[str, int]:
    """`sliding_window` and `global_every` of a record in which every `pattern`-th layer sees all.

    A list of the kinds of all layers, in newer files, goes before.
    """
    window = whole(record, "sliding_window", 0)
    kinds = record.get("layer_types")
    if kinds is None:
        # Where every layer is one that sees all, no layer has a window.
        window = 0 if pattern == 1 else window
        return {"sliding_window": window, "global_every": pattern if window else 0}
    if _WINDOW not in kinds:
        return {"sliding_window": 0, "global_every": 0}
    for every in (pattern, *range(2, len(kinds) + 1), 0):
        if kinds == layer_types(len(kinds), every):
            return {"sliding_window": window, "global_every": every}
    raise ConfigError(f"layer_types={kinds!r:.200} must repeat: windows, then one {_WHOLE!r}")


def check_layer_types(record: Record) -> None:
    """Raise `ConfigError` unless the list, if there is one, holds a kind for each layer."""
    kinds, layers = record.get("layer_types"), record["num_hidden_layers"]
    if kinds is None:
        return
    if not isinstance(kinds, list) or not {*map(str, kinds)} <= {_WHOLE, _WINDOW}:
        raise ConfigError(f"layer_types={kinds!r:.200} must hold {_WINDOW!r} and {_WHOLE!r}")
    if len(kinds) != layers:
        rule = f"one for each of num_hidden_layers={layers!r}"
        raise ConfigError(f"layer_types has {len(kinds)} entries, must have {rule}")


def check_no_windows(record: Record) -> None:
    """Raise `ConfigError` if the list of a model without a sliding window names layers with one."""
    kinds = record.get("layer_types", ())
    if _WINDOW in kinds:
        rule = f"without {_WINDOW!r}, because the model has no sliding window"
        raise ConfigError(f"layer_types={kinds!r:.200} must be {rule}")


def layer_types(n_layers: int, every: int) -> list[str]:
    """The kind of each layer when every `every`-th (0: none) sees the whole sequence."""
    return [_WHOLE if every and (i + 1) % every == 0 else _WINDOW for i in range(n_layers)]


_ROTATED = "partial_rotary_factor"
_WHOLE, _WINDOW = "full_attention", "sliding_attention"

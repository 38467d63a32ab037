"""The rules of `model.rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.config.schema import demand

_LENGTH = "original_max_position_embeddings"
_ROPE_SCALING = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _LENGTH), ()),
    "yarn": (("factor", _LENGTH), ("beta_fast", "beta_slow", "attention_factor")),
}
"""Kind of position scaling -> numbers that it needs, numbers that it may have, in the spelling of
published config.json files."""


def check_rope_scaling(scaling: Mapping[str, Any], theta: float) -> None:
    """Raises `ConfigError` unless `scaling` is empty or complete; `theta` is model.rope_theta."""
    if not scaling:
        return
    needed, optional = _ROPE_SCALING.get(scaling.get("rope_type"), (None, ()))
    kinds = " or ".join(map(repr, _ROPE_SCALING))
    demand(needed is not None, "model.rope_scaling", scaling, f"of rope_type {kinds}")
    names = {*needed, *optional}.intersection(scaling)
    also = f" (and {', '.join(optional)})" if optional else ""
    rule = f"rope_type and positive numbers {', '.join(needed)}{also}, nothing else"
    numbers = [scaling[name] for name in names]
    positive = all(type(n) in (int, float) and n > 0 for n in numbers)
    exact = names >= set(needed) and set(scaling) == {"rope_type", *names}
    demand(exact and positive, "model.rope_scaling", scaling, rule)
    if scaling["rope_type"] == "llama3":
        ordered = scaling["low_freq_factor"] < scaling["high_freq_factor"]
        rule = "with low_freq_factor below high_freq_factor"
        demand(ordered, "model.rope_scaling", scaling, rule)
    if scaling["rope_type"] == "yarn":
        fast, slow = scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)
        rule = "with beta_fast (default 32) at least beta_slow (default 1)"
        demand(fast >= slow, "model.rope_scaling", scaling, rule)
        # The logarithm of the base is divided by.
        rule = "above 1, because of the rope_type 'yarn'"
        demand(theta > 1, "model.rope_theta", theta, rule)

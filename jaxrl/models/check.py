"""Whether a mesh can divide a model and its batches, asked before anything long starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxrl.errors import ConfigError
from jaxrl.models.spread import mesh_axes
from jaxrl.sharding import DEFAULT_RULES, Rules

if TYPE_CHECKING:
    from jaxrl.config import ModelConfig


def check_mesh(
    config: ModelConfig,
    sizes: Mapping[str, int],
    *,
    rules: Rules = DEFAULT_RULES,
    rows: int | None = None,
    length: int | None = None,
    slots: int | None = None,
) -> None:
    """Raise `ConfigError` if mesh axes of these `sizes` do not divide the model, the `rows` of a
    micro-batch, their `length`, or the `slots` of a cache (None: not looked at).

    One message lists all that does not divide, with the numbers. Allocates nothing, and needs no
    devices: `sizes` is the shape of a mesh, or what its config says; axes of -1 are not looked at.
    """
    problems = []
    for axis, (name, size) in _sizes(config, rows, length, slots).items():
        names = [axis for axis in mesh_axes(rules.spec((axis,))[0]) if sizes.get(axis, 1) > 1]
        parts = math.prod(sizes[name] for name in names)
        if size % parts:
            product = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in names)
            written = f"{product} = {parts}" if len(names) > 1 else product
            problems.append(f"{name}={size} must be divisible by {written}")
    if problems:
        raise ConfigError("; ".join(problems))


def _sizes(
    config: ModelConfig, rows: int | None, length: int | None, slots: int | None
) -> dict[str, tuple[str, int]]:
    """Logical axis -> what its size is called, and the size."""
    model = {
        "vocab": ("model.vocab_size", config.vocab_size),
        "embed": ("model.d_model", config.d_model),
        "heads": ("model.n_heads", config.n_heads),
        "kv_heads": ("model.n_kv_heads", config.n_kv_heads),
        "head_dim": ("model.head_dim", config.head_dim),
    }
    if config.n_experts:
        model["experts"] = ("model.n_experts", config.n_experts)
        model["expert_mlp"] = ("model.mlp_dim", config.mlp_dim)
    else:
        model["mlp"] = ("model.mlp_dim", config.mlp_dim)
    if config.scan_layers:
        model["layers"] = ("model.n_layers", config.n_layers)
    given = {
        "batch": ("rows of a micro-batch", rows),
        "length": ("row length", length),
        "slots": ("slots", slots),
    }
    return model | {axis: pair for axis, pair in given.items() if pair[1] is not None}

"""Where a weight is in the model, and which shape it has in published files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl.config import ModelConfig


def path_of(keys: tuple, config: ModelConfig) -> tuple[str, range | None]:
    """Keys of a leaf, as `jax.tree_util` gives them -> its path, and the layers that it is of.

    The path is that within its layer; None: it is in no layer.
    """
    names = [str(key.key) for key in keys]
    if names[0] != "layers":
        return "/".join(names), None
    if config.scan_layers:
        return "/".join(names[1:]), range(config.n_layers)
    layer = int(names[1])
    return "/".join(names[2:]), range(layer, layer + 1)


def stored_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in files of the weight at `path` within its layer: heads and their width are one
    dimension there."""
    if path.endswith("_bias"):
        return (math.prod(shape),)
    if len(shape) < 3:
        return tuple(shape)
    if path == "attention/out":
        return (shape[0], math.prod(shape[1:]))
    return (math.prod(shape[:-1]), shape[-1])

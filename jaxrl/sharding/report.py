"""What a tree of arrays looks like on its devices, in words and bytes."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxrl.sharding.placement import path_name

_HEADER = ("path", "shape", "dtype", "spec", "bytes", "bytes/device")


def describe(tree: Any) -> str:
    """Table of a tree of arrays or `jax.ShapeDtypeStruct`: one line per leaf, then the sums.

    Columns: path, shape, dtype, partition spec, bytes of the whole array, bytes on each of its
    devices.
    """
    rows = []
    total = per_device = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        whole, local = _bytes(leaf, leaf.shape), _local_bytes(leaf)
        total, per_device = total + whole, per_device + local
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        rows.append((path_name(path), shape, str(leaf.dtype), _spec(leaf), whole, local))
    rows.append(("total", f"{len(rows)} arrays", "", "", total, per_device))
    cells = [_HEADER] + [(*row[:4], f"{row[4]:,}", f"{row[5]:,}") for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADER))]
    return "\n".join(_line(row, widths) for row in cells)


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays or `jax.ShapeDtypeStruct`.

    Every leaf is taken to lie on the same devices. A leaf without a sharding counts whole.
    """
    return sum(_local_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _bytes(leaf: Any, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * leaf.dtype.itemsize


def _local_bytes(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    return _bytes(leaf, leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))


def _spec(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return str(tuple(sharding.spec))
    return "" if sharding is None else type(sharding).__name__


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    """Text columns flush left, numbers flush right."""
    cells = [
        cell.ljust(width) if i < 4 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()

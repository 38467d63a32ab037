"""Products with weights that are split over a mesh, with the collectives written out.

Left to itself the compiler gathers whole batches of activations to spare itself the sum of a
weight's gradient. Here weights are gathered for use and their gradients scattered, once per use;
the residual stream is gathered along its length before products that `tensor` splits by output,
and what those that it splits by input give is summed and scattered along the length again
(Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from jaxrl.models.linear import linear
from jaxrl.models.spread import Spread, mesh_axes

_STREAM = ("batch", "residual", None)


class Arrays(NamedTuple):
    """A weight [*outputs, *inputs], and the factors [r, *inputs] and [*outputs, r] of its
    adapter."""

    weight: jax.Array
    a: jax.Array | None = None
    b: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class LinearMap:
    """Logical axes of the outputs and inputs of a linear map; its adapter is multiplied by
    `factor`."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    factor: float = 0.0

    def axes(self, arrays: Arrays) -> Arrays:
        """Logical axes of its arrays."""
        weight = (*self.outputs, *self.inputs)
        if arrays.a is None:
            return Arrays(weight)
        return Arrays(weight, (None, *self.inputs), (*self.outputs, None))

    def __call__(self, x: jax.Array, arrays: Arrays) -> jax.Array:
        """x [B, T, I] -> [B, T, O], outputs and inputs flattened."""
        y = linear(x, arrays.weight.reshape(-1, x.shape[-1]))
        if arrays.a is None:
            return y
        inner = linear(x, arrays.a.reshape(arrays.a.shape[0], -1))
        return y + self.factor * linear(inner, arrays.b.reshape(-1, arrays.b.shape[-1]))


def columns(
    x: jax.Array, maps: Sequence[tuple[LinearMap, Arrays]], spread: Spread
) -> tuple[jax.Array, ...]:
    """x [B, T, D] of the residual stream -> for each map [B, T, *outputs], split by output."""
    layouts = [layout for layout, _ in maps]
    arrays = [arrays for _, arrays in maps]
    axes = [layout.axes(own) for layout, own in maps]
    out = tuple(("batch", "length", *layout.outputs) for layout in layouts)

    def local(x: jax.Array, arrays: list[Arrays]) -> tuple[jax.Array, ...]:
        x = gather_stream(x, spread)
        return tuple(
            _shaped(layout(x, gather_embed(own, names, spread, x.dtype)), own.weight, layout)
            for layout, own, names in zip(layouts, arrays, axes, strict=True)
        )

    return run_local(local, spread, (_STREAM, axes), out)(x, arrays)


def rows(x: jax.Array, layout: LinearMap, arrays: Arrays, spread: Spread) -> jax.Array:
    """x [B, T, *inputs], split by input -> [B, T, D] of the residual stream."""
    axes = layout.axes(arrays)
    summed = [name for axis in layout.inputs for name in mesh_axes(spread.rules.spec((axis,))[0])]

    def local(x: jax.Array, arrays: Arrays) -> jax.Array:
        x = x.reshape(*x.shape[:2], -1)
        y = layout(x, gather_embed(arrays, axes, spread, x.dtype))
        return scatter_stream(y, summed, spread)

    inputs = ("batch", "length", *layout.inputs)
    return run_local(local, spread, (inputs, axes), _STREAM)(x, arrays)


def look_up(table: jax.Array, tokens: jax.Array, spread: Spread, dtype: Any) -> jax.Array:
    """table [V, D], tokens int32 [B, T] -> [B, T, D] of the residual stream in `dtype`."""
    axes = ("vocab", "embed")

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        table = gather_embed(table, axes, spread, dtype)
        row = tokens - first_of(table, spread, "vocab")
        here = (row >= 0) & (row < len(table))
        found = jnp.where(here[..., None], table[jnp.clip(row, 0, len(table) - 1)], 0)
        return scatter_stream(found, mesh_axes(spread.rules.spec(("vocab",))[0]), spread)

    return run_local(local, spread, (axes, ("batch", "length")), _STREAM)(table, tokens)


def run_local(local: Callable, spread: Spread, inputs: Any, outputs: Any) -> Callable:
    """`local` as a function of whole arrays; `inputs` and `outputs` are trees of logical axes.

    Each device calls it with its parts. What a gradient needs to be summed over is summed where
    an argument comes in.
    """

    def is_axes(node: Any) -> bool:
        return type(node) is tuple and all(name is None or isinstance(name, str) for name in node)

    in_specs = jax.tree.map(spread.spec, inputs, is_leaf=is_axes)
    out_specs = jax.tree.map(spread.spec, outputs, is_leaf=is_axes)

    def vary(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        split = {name for entry in spec for name in mesh_axes(entry)}
        same = tuple(name for name in spread.mesh.axis_names if name not in split)
        return lax.pcast(x, same, to="varying") if same else x

    def typed(*args: Any) -> Any:
        if not spread.divided:
            return local(*args)
        leaves, treedef = jax.tree.flatten(args)
        specs = treedef.flatten_up_to(in_specs)
        return local(*treedef.unflatten(map(vary, leaves, specs)))

    # Tokens that are not divided are the same on several devices, which types could not tell.
    return jax.shard_map(
        typed,
        mesh=spread.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=spread.divided,
    )


def gather_stream(x: jax.Array, spread: Spread) -> jax.Array:
    """x [B, T, D] of one device, with the parts of its length that `tensor` split."""
    names = spread.several(spread.stream)
    return lax.all_gather(x, names, axis=1, tiled=True) if names else x


def scatter_stream(x: jax.Array, summed: Sequence[str], spread: Spread) -> jax.Array:
    """The sum of x [B, T, D] over the mesh axes `summed`; each device keeps its part of the
    residual stream."""
    rest = set(summed)
    if rest.issuperset(spread.stream):
        split = spread.several(spread.stream)
        x = lax.psum_scatter(x, split, scatter_dimension=1, tiled=True) if split else x
        rest = rest.difference(spread.stream)
    return lax.psum(x, tuple(rest)) if rest else x


def gather_embed(arrays: Any, axes: Any, spread: Spread, dtype: Any) -> Any:
    """Weights of one device in `dtype` with all of the width that `embed` axes split; gradients
    are scattered again."""

    def gather(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        x = x.astype(dtype)  # what travels is as narrow as what is computed with
        for dim, name in enumerate(names):
            if name in ("embed", "expert_embed"):
                split = spread.several(mesh_axes(spread.rules.spec((name,))[0]))
                x = _gathered(x, split, dim) if split else x
        return x

    leaves, treedef = jax.tree.flatten(arrays)
    return treedef.unflatten(map(gather, leaves, treedef.flatten_up_to(axes)))


def _gathered(x: jax.Array, names: Sequence[str], dim: int) -> jax.Array:
    """`x` whole in `dim`, which the mesh axes `names` split.

    It travels as a matrix whose rows are divided, and so does its gradient: in other layouts the
    TPU compiler sums the gradient on every device and keeps a slice, which sends twice as much.
    """
    first = jnp.moveaxis(x, dim, 0)
    whole = lax.all_gather(first.reshape(len(first), -1), names, axis=0, tiled=True)
    whole = with_layout_constraint(whole, Layout((0, 1)))
    return jnp.moveaxis(whole.reshape(-1, *first.shape[1:]), 0, dim)


def first_of(part: jax.Array, spread: Spread, axis: str) -> jax.Array | int:
    """Which number of the logical `axis` the first row of this device's `part` has."""
    names = spread.several(mesh_axes(spread.rules.spec((axis,))[0]))
    return lax.axis_index(names) * len(part) if names else 0


def _shaped(y: jax.Array, weight: jax.Array, layout: LinearMap) -> jax.Array:
    """y [B, T, O] -> [B, T, *outputs]."""
    return y.reshape(*y.shape[:2], *weight.shape[: len(layout.outputs)])

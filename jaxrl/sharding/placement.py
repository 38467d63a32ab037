"""Placing trees of arrays on a mesh, and moving them between meshes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from jaxrl.sharding.rules import LogicalAxes, Rules

Tree = Any
AxesOf = Tree | Callable[[str, Any], LogicalAxes | None]


def shardings_of(abstract_tree: Tree, mesh: Mesh, rules: Rules, axes_of: AxesOf) -> Tree:
    """Tree of NamedSharding for a tree of arrays or `jax.ShapeDtypeStruct`.

    `axes_of` names the logical axis of each dimension (None: not split): a tree of tuples with the
    structure of `abstract_tree`, or a function (path, leaf) -> tuple, where path is the
    "/"-joined keys. None instead of a tuple means that the whole array is not split.

    Raises `ValueError` for a tuple of the wrong length, an unknown logical axis, and for dimensions
    that the mesh axes do not divide: one message lists path, dimension and sizes of all of those.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract_tree)
    paths = [path_name(path) for path, _ in leaves]
    if callable(axes_of):
        axes = [axes_of(path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)]
    else:
        axes = treedef.flatten_up_to(axes_of)
    shardings, problems = [], []
    for path, (_, leaf), names in zip(paths, leaves, axes, strict=True):
        sharding = _sharding_of(path, np.shape(leaf), names, mesh, rules)
        problems += _indivisible(path, np.shape(leaf), names, sharding)
        shardings.append(sharding)
    if problems:
        raise ValueError("the mesh cannot split these arrays:\n  " + "\n  ".join(problems))
    return treedef.unflatten(shardings)


def place(tree: Tree, mesh: Mesh, rules: Rules, *, axes_of: AxesOf) -> Tree:
    """A copy of `tree` (numpy or jax arrays) on `mesh`, split by `rules`; see `shardings_of`.

    The result never shares memory with `tree`.
    """
    return reshard(tree, shardings_of(tree, mesh, rules, axes_of))


def reshard(tree: Tree, shardings: Tree | Sharding) -> Tree:
    """A copy of `tree` under `shardings` (one for all, or a tree of them), also on another mesh.

    The result never shares memory with `tree`, not even where the layout stays the same: either may
    then be donated or changed without harm to the other. Within one set of devices the copy is one
    compiled program; between sets it goes through `jax.device_put`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if isinstance(shardings, Sharding):
        targets = [shardings] * len(leaves)
    else:
        targets = treedef.flatten_up_to(shardings)
    moved = [_onto_devices(x, target) for x, target in zip(leaves, targets, strict=True)]
    copied = list(moved)
    # One program per set of devices: jit refuses arguments that live on different ones.
    groups: dict[Any, list[int]] = {}
    for i, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        # Arrays from the host, or from wholly other devices, were copied by _onto_devices.
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set & target.device_set:
            groups.setdefault(_device_order(target), []).append(i)
    for indices in groups.values():
        copy = _copier(tuple(targets[i] for i in indices))
        for i, out in zip(indices, copy([moved[i] for i in indices]), strict=True):
            copied[i] = out
    return treedef.unflatten(copied)


def copy_to_processes(tree: Tree, meshes: Sequence[Mesh], shardings: Tree) -> Tree:
    """A whole copy of `tree`, whose arrays may be spread over processes, for each process.

    `meshes` as from `process_meshes`, `shardings` on this process's own; so is what comes back,
    which shares no memory with `tree`. Every process has to call it: the copies are made by
    collectives between devices, and no host holds an array.
    """
    grid = np.stack([mesh.devices for mesh in meshes])
    axes = (_PROCESS, *meshes[0].axis_names)
    everywhere = Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))
    spread = jax.tree.map(lambda own: NamedSharding(everywhere, own.spec), shardings)

    def own_part(copy: jax.Array, own: NamedSharding) -> jax.Array:
        parts = [shard.data for shard in copy.addressable_shards]
        return jax.make_array_from_single_device_arrays(copy.shape, own, parts)

    return jax.tree.map(own_part, reshard(tree, spread), shardings)


_PROCESS = "process"  # of the mesh over all processes' meshes


def path_name(path: tuple) -> str:
    """Key path of `jax.tree_util` -> "/"-joined names."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _onto_devices(x: Any, target: Sharding) -> jax.Array:
    """x on the devices of `target`; a jax array may still share its buffers with the result."""
    if not isinstance(x, jax.Array):
        # np.array, because device_put may keep a view of the host's memory on CPU.
        return jax.device_put(np.array(x), target)
    if _device_order(x.sharding) == _device_order(target):
        return x
    return jax.device_put(x, target)


def _device_order(sharding: Sharding) -> tuple[jax.Device, ...] | frozenset[jax.Device]:
    """What must agree within one program: the devices, and their order where it is known."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return (
        tuple(sharding.device_set)
        if len(sharding.device_set) == 1
        else frozenset(sharding.device_set)
    )


@functools.lru_cache(maxsize=64)
def _copier(shardings: tuple[Sharding, ...]) -> Callable[[list], list]:
    """Jitted copy of a list of arrays into `shardings`; kept, so that it compiles once."""

    def copy(leaves: list[jax.Array]) -> list[jax.Array]:
        # jnp.copy is needed: jit returns an argument that it passes through as the same buffer.
        return [jnp.copy(x) for x in leaves]

    return jax.jit(copy, out_shardings=list(shardings))


def _sharding_of(
    path: str, shape: tuple[int, ...], names: LogicalAxes | None, mesh: Mesh, rules: Rules
) -> NamedSharding:
    """The sharding of one array; errors carry its path."""
    names = (None,) * len(shape) if names is None else names
    if isinstance(names, str) or len(names) != len(shape):
        raise ValueError(
            f"{path!r} has shape {shape}, so it needs {len(shape)} logical axes, not {names!r}"
        )
    try:
        return rules.sharding(mesh, names)
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}") from error


def _indivisible(
    path: str, shape: tuple[int, ...], names: LogicalAxes | None, sharding: NamedSharding
) -> list[str]:
    """One line for each dimension that its mesh axes do not divide."""
    lines = []
    for dim, (size, entry) in enumerate(zip(shape, sharding.spec, strict=True)):
        mesh_axes = (entry,) if isinstance(entry, str) else (entry or ())
        sizes = {axis: sharding.mesh.shape[axis] for axis in mesh_axes}
        if size % math.prod(sizes.values()):
            product = " x ".join(f"{axis}={n}" for axis, n in sizes.items())
            lines.append(
                f"{path!r} {shape}: dimension {dim} ({names[dim]!r}) of size {size} "
                f"must be divisible by {product}"
            )
    return lines

"""What an optimizer update changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


class TrainState(NamedTuple):
    """Trained weights, the optimizer's state, and the number of updates done (int32 scalar).

    The jitted step donates it: after an update the arrays of the state before are gone.
    """

    params: Any
    opt_state: Any
    step: jax.Array


def state_shardings(
    abstract: Any, params: Any, optimizer: Any, mesh: Mesh | AbstractMesh
) -> TrainState:
    """Tree of NamedSharding of the state of weights `abstract` that lie as `params` say.

    A moment of a weight's shape lies where the weight does; a factored one, which lacks one of its
    dimensions, is split as the rest of the weight; everything else is on every device.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    targets = treedef.flatten_up_to(params)
    weights = {
        path: (leaf.shape, sharding) for (path, leaf), sharding in zip(leaves, targets, strict=True)
    }

    def lies(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        # Optimizers keep trees of the weights' structure: the end of a path names the weight.
        ends = (path[i:] for i in range(len(path) + 1))
        found = next((weights[end] for end in ends if end in weights), None)
        return replicated if found is None else _like(leaf.shape, *found, replicated)

    opt_state = jax.tree_util.tree_map_with_path(lies, jax.eval_shape(optimizer.init, abstract))
    return TrainState(params, opt_state, replicated)


def abstract_state(abstract: Any, shardings: TrainState, optimizer: Any) -> TrainState:
    """The state of weights `abstract` as `jax.ShapeDtypeStruct` with `shardings`; nothing is
    allocated."""
    opt_state = jax.eval_shape(optimizer.init, abstract)
    shapes = TrainState(abstract, opt_state, jax.ShapeDtypeStruct((), np.int32))
    return jax.tree.map(
        lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
        shapes,
        shardings,
    )


def _like(
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    sharding: NamedSharding,
    replicated: NamedSharding,
) -> NamedSharding:
    """How something of `shape` lies that belongs to a weight of shape `whole`."""
    if shape == whole:
        return sharding
    spec = (*sharding.spec, *(None,) * (len(whole) - len(sharding.spec)))
    for dim in range(len(whole)):
        if shape == whole[:dim] + whole[dim + 1 :]:
            return NamedSharding(sharding.mesh, PartitionSpec(*spec[:dim], *spec[dim + 1 :]))
    return replicated

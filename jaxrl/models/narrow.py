"""Weights in the dtype that they are computed with, for those who only use them.

Every product casts its weight to `model.dtype` first. A sampler that keeps the weights so has the
same numbers, bit for bit, in half of the memory where they are trained in float32 and computed with
in bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.lora import join_frozen, split_frozen
from jaxrl.models.model import Model


def narrow_model(model: Model) -> Model:
    """`model` with the dtypes of `narrow`: what is trained in `model.dtype` unless that is wider.

    The scales of norms stay, which are computed with in float32, and so do frozen weights, which
    trainer and sampler may share.
    """
    trained, frozen = split_frozen(model.abstract)
    dtype = jnp.dtype(model.config.dtype)

    def narrowed(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if path[-1].key == "scale" or leaf.dtype.itemsize <= dtype.itemsize:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    trained = jax.tree_util.tree_map_with_path(narrowed, trained)
    return dataclasses.replace(model, abstract=join_frozen(trained, frozen))


def narrow(params: Any, abstract: Any) -> Any:
    """`params` in the dtypes of `abstract`, in the layout that they have.

    Leaves of the right dtype are the same arrays, not copies; the others never share memory.
    """
    leaves, treedef = jax.tree.flatten(params)
    wanted = [leaf.dtype for leaf in treedef.flatten_up_to(abstract)]
    wide = [i for i, leaf in enumerate(leaves) if leaf.dtype != wanted[i]]
    if not wide:
        return params
    shardings = tuple(leaves[i].sharding for i in wide)
    cast = _caster(shardings, tuple(wanted[i] for i in wide))
    for i, leaf in zip(wide, cast([leaves[i] for i in wide]), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


@functools.lru_cache(maxsize=16)
def _caster(shardings: tuple, dtypes: tuple) -> Callable[[list], list]:
    """Jitted cast of a list of arrays; kept, so that it compiles once."""

    def cast(leaves: list[jax.Array]) -> list[jax.Array]:
        return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]

    return jax.jit(cast, out_shardings=list(shardings))

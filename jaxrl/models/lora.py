"""Adapters (LoRA, Hu et al. 2021) as part of the tree of weights: taken apart, joined, merged.

The weights of an adapter lie beside the weight that they change: "attention/query_lora/a" and
"…/b" beside "attention/query". Only they are trained and published; the rest is frozen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.model import Model, Params, build_model

_SUFFIX = "_lora"


def split_frozen(tree: Any) -> tuple[Params, Params]:
    """(what is trained, what is frozen) of a tree of weights, or of anything of its structure.

    Adapters if there are any, and all the rest; else everything, and nothing.
    """
    adapters, rest = _split(tree) if isinstance(tree, dict) else ({}, tree)
    return (adapters, rest) if adapters else (tree, {})


def join_frozen(trained: Any, frozen: Any) -> Params:
    """The inverse of `split_frozen`; the leaves are shared, not copied."""
    if not frozen:
        return trained
    return _join(trained, frozen)


def holds_adapters(names: Iterable[str]) -> bool:
    """Whether one of the "/"-joined names of weights is that of an adapter."""
    return any(f"{_SUFFIX}/" in name for name in names)


def base_model(model: Model) -> Model:
    """The model without adapters."""
    if not model.config.lora_rank:
        return model
    return build_model(dataclasses.replace(model.config, lora_rank=0))


def merge_adapters(model: Model, params: Params) -> tuple[Model, Params]:
    """(model, weights) without adapters that compute the same: W + alpha/rank * B A.

    The product is taken in float32 and the sum rounded to the dtype of the weights.
    """
    config = model.config
    if not config.lora_rank:
        return model, params
    merge = functools.partial(
        _merge, factor=config.lora_alpha / config.lora_rank, scanned=config.scan_layers
    )
    # One jitted call for each weight: the whole tree at once would need it twice in memory.
    return base_model(model), _merge_tree(params, jax.jit(merge))


def _split(tree: Any) -> tuple[Params, Params]:
    adapters, rest = {}, {}
    for key, value in tree.items():
        if str(key).endswith(_SUFFIX):
            adapters[key] = value
        elif isinstance(value, dict):
            inner, rest[key] = _split(value)
            if inner:
                adapters[key] = inner
        else:
            rest[key] = value
    return adapters, rest


def _join(trained: Params, frozen: Params) -> Params:
    joined = dict(frozen)
    for key, value in trained.items():
        joined[key] = _join(value, frozen[key]) if key in frozen else value
    return joined


def _merge_tree(tree: Params, merge: Any) -> Params:
    merged = {}
    for key, value in tree.items():
        if key.endswith(_SUFFIX):
            continue
        adapter = tree.get(f"{key}{_SUFFIX}")
        if adapter is not None:
            value = merge(value, adapter["a"], adapter["b"])
        elif isinstance(value, dict):
            value = _merge_tree(value, merge)
        merged[key] = value
    return merged


def _merge(weight: jax.Array, a: jax.Array, b: jax.Array, *, factor: float, scanned: bool):
    """weight [*outputs, *inputs], a [r, *inputs], b [*outputs, r] -> weight; [L, …] if scanned."""
    if scanned:
        one = functools.partial(_merge, factor=factor, scanned=False)
        return jax.vmap(one)(weight, a, b)
    change = jnp.tensordot(b.astype(jnp.float32), a.astype(jnp.float32), axes=1)
    return (weight.astype(jnp.float32) + factor * change).astype(weight.dtype)

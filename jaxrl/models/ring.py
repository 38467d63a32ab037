"""Causal attention over a sequence whose length is split over devices.

Keys and values travel around the ring of devices, one step at a time, past queries that stay where
they are (Liu et al. 2023, "Ring Attention with Blockwise Transformers"). No device ever holds those
of the whole length, in the backward pass neither: it sends them around again, and their gradients
with them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.models.attention import MASKED, softcap
from jaxrl.models.spread import Spread


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ring: mesh axis `axis` with `parts` devices. Keys are passed on in `steps` steps, fewer
    than `parts` where a window lets no query look further. Scores are capped by `cap`."""

    axis: str
    parts: int
    steps: int
    cap: float


def ring_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    spread: Spread,
    *,
    window: int | jax.Array = 0,
    widest: int = 0,
    scale: float | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """query [B, T, N, H], key and value [B, T, K, H], segment_ids [B, T] -> [B, T, N, H].

    As `attention.attend` with `attention.causal_mask`. `window` may be traced; `widest` (static)
    then bounds it, 0: nothing does.
    """
    heads = spread.spec(("batch", "length", "heads", "head_dim"))
    kv_heads = spread.spec(("batch", "length", "kv_heads", "head_dim"))
    rows = spread.spec(("batch", "length"))
    parts = spread.parts("length")
    own = query.shape[1] // parts
    reach = parts - 1 if not widest else min(parts - 1, -(-(widest - 1) // own))
    ring = Ring(rows[1], parts, reach, cap)
    far = jnp.where(jnp.asarray(window) > 0, window, query.shape[1]).astype(jnp.int32)

    def local(
        query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array, far: jax.Array
    ) -> jax.Array:
        width = query.shape[-1]
        grouped = query.reshape(*query.shape[:2], key.shape[2], -1, width)
        grouped = grouped * (width**-0.5 if scale is None else scale)
        keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
        return _attend(ring, grouped, keys, values, segments, far).reshape(query.shape)

    run = jax.shard_map(
        local,
        mesh=spread.mesh,
        in_specs=(heads, kv_heads, kv_heads, rows, jax.sharding.PartitionSpec()),
        out_specs=heads,
        check_vma=False,
    )
    return run(query, key, value, segment_ids, far)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    ring: Ring,
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    segments: jax.Array,
    far: jax.Array,
) -> jax.Array:
    """query [B, T, K, G, H] (scaled), keys and values [B, K, T, H] of this device -> like query."""
    return _forward(ring, query, keys, values, segments, far)[0]


def _forward(
    ring: Ring,
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    segments: jax.Array,
    far: jax.Array,
) -> tuple[jax.Array, tuple]:
    own = lax.axis_index(ring.axis)

    def look(distance: jax.Array, sums: tuple, sides: tuple) -> tuple:
        """One block under a running softmax."""
        top, total, mixed = sums
        keys, values, other = sides
        seen = _visible(segments, other, distance * keys.shape[2], far)
        scores = jnp.where(seen, softcap(_dots(query, keys), ring.cap), MASKED)
        highest = jnp.maximum(top, jnp.max(scores, axis=-1))
        shrink, weights = jnp.exp(top - highest), jnp.exp(scores - highest[..., None])
        total = total * shrink + jnp.sum(weights, axis=-1)
        return highest, total, mixed * shrink[..., None] + _mix(weights, values)

    def step(carry: tuple, distance: jax.Array) -> tuple[tuple, None]:
        sums, sides = carry
        sides = _pass_on(ring, sides)
        # What comes from a device further along the sequence is hidden from all of these queries.
        sums = lax.cond(distance <= own, look, lambda _, sums, sides: sums, distance, sums, sides)
        return (sums, sides), None

    batch, length, n_kv_heads, groups, width = query.shape
    shape = (batch, n_kv_heads, groups, length)
    start = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, width)))
    sides = (keys, values, segments)
    # Their own tokens come first: every query sees itself, so that the maximum is a real score.
    sums = look(jnp.int32(0), start, sides)
    if ring.steps:
        (sums, _), _ = lax.scan(step, (sums, sides), jnp.arange(1, ring.steps + 1))
    top, total, mixed = sums
    out = jnp.moveaxis(mixed / total[..., None], 3, 1).astype(query.dtype)
    return out, (query, keys, values, segments, far, out, top + jnp.log(total))


def _backward(ring: Ring, saved: tuple, grad: jax.Array) -> tuple:
    query, keys, values, segments, far, out, normaliser = saved
    own = lax.axis_index(ring.axis)
    wide = grad.astype(jnp.float32)
    # Dao et al. 2022, "FlashAttention", appendix B.4.
    drift = jnp.moveaxis(jnp.sum(wide * out.astype(jnp.float32), axis=-1), 1, 3)

    def look(distance: jax.Array, grads: tuple, sides: tuple) -> tuple:
        """What one block adds to the gradients of queries (here), and keys and values (there)."""
        keys, values, other = sides
        seen = _visible(segments, other, distance * keys.shape[2], far)
        capped = softcap(_dots(query, keys), ring.cap)
        weights = jnp.where(seen, jnp.exp(capped - normaliser[..., None]), 0.0)
        d_scores = weights * (_dots(wide, values) - drift[..., None])
        if ring.cap:
            d_scores *= 1 - (capped / ring.cap) ** 2
        d_query = jnp.einsum("bkgts,bksh->btkgh", d_scores, keys.astype(jnp.float32))
        d_keys = jnp.einsum("bkgts,btkgh->bksh", d_scores, query.astype(jnp.float32))
        d_values = jnp.einsum("bkgts,btkgh->bksh", weights, wide)
        return tuple(total + d for total, d in zip(grads, (d_query, d_keys, d_values), strict=True))

    def step(carry: tuple, distance: jax.Array) -> tuple[tuple, None]:
        (d_query, *rest), sides = carry
        d_keys, d_values, *sides = _pass_on(ring, (*rest, *sides))
        grads, sides = (d_query, d_keys, d_values), tuple(sides)
        grads = lax.cond(
            distance <= own, look, lambda _, grads, sides: grads, distance, grads, sides
        )
        return (grads, sides), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, keys, values))
    sides = (keys, values, segments)
    grads = look(jnp.int32(0), start, sides)
    if ring.steps:
        (grads, _), _ = lax.scan(step, (grads, sides), jnp.arange(1, ring.steps + 1))
    d_query, *rest = grads
    # They have gone as many devices along as there were steps: home again.
    d_keys, d_values = _pass_on(ring, tuple(rest), -ring.steps) if ring.steps else rest
    return (
        d_query.astype(query.dtype),
        d_keys.astype(keys.dtype),
        d_values.astype(values.dtype),
        None,
        None,
    )


_attend.defvjp(_forward, _backward)


def _dots(query: jax.Array, keys: jax.Array) -> jax.Array:
    """query [B, T, K, G, H], keys [B, K, S, H] -> float32 [B, K, G, T, S]."""
    return jnp.einsum("btkgh,bksh->bkgts", query, keys, preferred_element_type=jnp.float32)


def _mix(weights: jax.Array, values: jax.Array) -> jax.Array:
    """weights [B, K, G, T, S], values [B, K, S, H] -> float32 [B, K, G, T, H]."""
    weights = weights.astype(values.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", weights, values, preferred_element_type=jnp.float32)


def _visible(segments: jax.Array, other: jax.Array, ahead: jax.Array, far: jax.Array) -> jax.Array:
    """segments [B, T], `other` [B, S] of tokens that stand `ahead` places before -> bool
    [B, 1, 1, T, S]: earlier or same, among the last `far`, and of the same segment."""
    length = segments.shape[1]
    earlier = jnp.arange(length)[:, None] - jnp.arange(length) + ahead
    near = (earlier >= 0) & (earlier < far)
    return (near & (segments[:, :, None] == other[:, None, :]))[:, None, None]


def _pass_on(ring: Ring, tree: tuple, places: int = 1) -> tuple:
    """To the device so many `places` along the ring."""
    pairs = [(i, (i + places) % ring.parts) for i in range(ring.parts)]
    return jax.tree.map(lambda x: lax.ppermute(x, ring.axis, pairs), tree)

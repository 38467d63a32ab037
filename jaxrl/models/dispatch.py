"""Experts on a mesh: tokens travel to the devices that hold their experts, and back.

Every device lays the tokens of its rows into buckets, one for each expert, and an all-to-all over
the mesh axis `expert` brings the buckets of an expert to its owner. Buckets have room for somewhat
more than an even share. What does not fit goes in a further round, for which all of a group agree
that it is needed: so the usual routing moves and computes little more than what was chosen, and no
routing drops a token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.models.parallel import gather_embed, gather_stream, run_local, scatter_stream
from jaxrl.models.spread import Spread, mesh_axes

_SLACK = 1.5  # room of a bucket, in even shares: unevenness of a usual routing fits in
_FEW = 8  # a device with so few tokens has room for all in every bucket


class Weights(NamedTuple):
    """Of all experts: router [E, D], gate and up [E, F, D], down [E, D, F]."""

    router: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array


AXES = Weights(
    router=(None, "embed"),
    gate=("experts", "expert_mlp", "expert_embed"),
    up=("experts", "expert_mlp", "expert_embed"),
    down=("experts", "expert_embed", "expert_mlp"),
)

Route = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(rows [n, D], router [E, D]) -> (shares, chosen experts), both [n, k]."""


@dataclasses.dataclass(frozen=True)
class _Group:
    """What tokens do: `route` sends them to `k` experts each, in a bucket for each; buckets are
    exchanged over the mesh axes `axes` (none where one device has all experts)."""

    route: Route
    k: int
    activation: Callable[[jax.Array], jax.Array]
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes of the buckets of one device: `room` tokens for each of `experts`, in `rounds`."""

    experts: int
    room: int
    rounds: int


def bucket_sizes(tokens: int, experts: int, k: int) -> Buckets:
    """Buckets for the tokens of one device, each of which goes to k experts."""
    room = min(tokens, max(math.ceil(_SLACK * tokens * k / experts), _FEW))
    return Buckets(experts, room, math.ceil(tokens / room))


def experts_on_mesh(
    x: jax.Array,
    weights: Weights,
    spread: Spread,
    *,
    route: Route,
    k: int,
    activation: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """x [B, T, D] -> [B, T, D]: the weighted sum of what each token's k experts say.

    Tokens are divided over all axes but `tensor`, also where the rows of x are too few for that.
    The width of an expert's MLP is divided over `tensor` and `expert_tensor`; the devices of an
    `expert_tensor` group gather each other's rows first, and each keeps the sums of its own.
    """
    shape, tokens = x.shape, x.shape[0] * x.shape[1]
    if spread.rows is None and tokens % spread.parts("slots") == 0:
        x = x.reshape(tokens, 1, -1)
        spread = dataclasses.replace(spread, rows="slots", length=None, residual=None)
    stream = ("batch", "residual", None)
    shared = spread.several(mesh_axes(spread.spec(("batch",))[0]))
    shared = tuple(name for name in shared if name == "expert_tensor")
    width = mesh_axes(spread.rules.spec(("expert_mlp",))[0])
    owners = spread.several(mesh_axes(spread.rules.spec(("experts",))[0]))
    group = _Group(route, k, activation, owners)

    def local(x: jax.Array, weights: Weights) -> jax.Array:
        x = gather_stream(x, spread)
        if shared:
            x = lax.all_gather(x, shared, axis=0, tiled=True)
        weights = gather_embed(weights, AXES, spread, x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        mixed = _mix(rows, weights, group).reshape(x.shape)
        if shared:
            mixed = lax.psum_scatter(mixed, shared, scatter_dimension=0, tiled=True)
        return scatter_stream(mixed, [name for name in width if name not in shared], spread)

    return run_local(local, spread, (stream, AXES), stream)(x, weights).reshape(shape)


def _mix(rows: jax.Array, weights: Weights, group: _Group) -> jax.Array:
    """rows [n, D] of one device -> [n, D], summed over its part of the experts' width."""
    shares, chosen = group.route(rows, weights.router)
    sizes = bucket_sizes(len(rows), weights.router.shape[0], group.k)
    queues = _queue(chosen, sizes.experts)
    longest = jnp.max(queues.length)
    if group.axes:
        # All of a group must enter a round: it exchanges tokens among them.
        longest = lax.pmax(longest, group.axes)

    # A choice and not a constant: its type says that it differs between devices, as tokens do.
    nothing = lax.stop_gradient(jnp.where(longest < 0, rows, 0))

    def at(first: jax.Array) -> jax.Array:
        return _one_round(rows, shares, chosen, queues, weights, sizes.room, first, group)

    def needed(first: jax.Array) -> jax.Array:
        return lax.cond(first < longest, at, lambda first: nothing, first)

    def further() -> jax.Array:
        def add(total: jax.Array, first: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.checkpoint(needed)(first), None

        firsts = jnp.arange(1, sizes.rounds, dtype=jnp.int32) * sizes.room
        return lax.scan(add, nothing, firsts)[0]

    usual = at(jnp.int32(0))
    if sizes.rounds == 1:
        return usual
    # Made again for the gradient as they are rare, and from outside of the conditions: what these
    # save, they save for every round, weights too.
    rare = jax.checkpoint(lambda: lax.cond(longest > sizes.room, further, lambda: nothing))
    return usual + rare()


class _Queues(NamedTuple):
    """Who waits for each expert: `order` [n*k] lists (token, choice) pairs by expert; an expert's
    begin at `start` [E] and are `length` [E] many; a pair's `place` [n, k] in its queue."""

    order: jax.Array
    start: jax.Array
    length: jax.Array
    place: jax.Array


def _queue(chosen: jax.Array, experts: int) -> _Queues:
    """chosen [n, k] -> the queues of all experts, each in the order of the tokens."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    length = jnp.bincount(flat, length=experts)
    start = jnp.cumsum(length) - length
    rank = jnp.arange(flat.size, dtype=jnp.int32) - start[flat[order]]
    place = jnp.zeros_like(rank).at[order].set(rank)
    return _Queues(order, start, length, place.reshape(chosen.shape))


def _one_round(
    rows: jax.Array,
    shares: jax.Array,
    chosen: jax.Array,
    queues: _Queues,
    weights: Weights,
    room: int,
    first: jax.Array,
    group: _Group,
) -> jax.Array:
    """What experts say to the tokens at `first` … `first + room - 1` of their queues: [n, D]."""
    experts, k = len(queues.start), chosen.shape[1]
    place = first + jnp.arange(room)
    pair = jnp.minimum(queues.start[:, None] + place, queues.order.size - 1)
    waits = place < queues.length[:, None]
    sent = jnp.where(waits[..., None], rows[queues.order[pair] // k], 0)
    own = _exchange(sent.reshape(-1, len(weights.gate), room, rows.shape[-1]), group)
    said = _exchange(_mlp(own, weights, group.activation), group).reshape(experts, room, -1)
    slot = queues.place - first
    inside = (slot >= 0) & (slot < room)
    answers = jnp.where(inside[..., None], said[chosen, jnp.clip(slot, 0, room - 1)], 0)
    return jnp.einsum("nkd,nk->nd", answers, shares.astype(rows.dtype))


def _exchange(buckets: jax.Array, group: _Group) -> jax.Array:
    """buckets [P, E/P, R, D], P devices of a group: the first dimension goes from "whom I send it
    to" to "who sent it", or back."""
    if not group.axes:
        return buckets
    return lax.all_to_all(buckets, group.axes, split_axis=0, concat_axis=0, tiled=True)


def _mlp(
    buckets: jax.Array, weights: Weights, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """buckets [P, E, R, D] for the experts of this device -> the same shape."""
    inner = activation(jnp.einsum("perd,efd->perf", buckets, weights.gate))
    inner = inner * jnp.einsum("perd,efd->perf", buckets, weights.up)
    return jnp.einsum("perf,edf->perd", inner, weights.down)

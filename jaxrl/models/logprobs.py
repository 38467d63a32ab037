"""Log-probabilities from hidden states, some tokens at a time: logits of all would be too many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.models.attention import softcap
from jaxrl.models.parallel import first_of, gather_embed, gather_stream, run_local
from jaxrl.models.spread import Spread, mesh_axes

_FEWEST = 256
"""Tokens of a device in one round, unless fewer are asked for: each round reads and writes the
whole gradient of the weight, in float32, which with fewer takes longer than the products by the
peak and bandwidth of a v5e chip (docs/decisions/0018)."""


def chunk_width(chunk: int, rows: int, devices: int = 1) -> int:
    """How many tokens of each of a device's `rows` are unembedded at a time, if those of a batch
    on so many `devices` should be about `chunk`; on each device at least 256, or `chunk`."""
    return max(1, max(chunk // devices, min(chunk, _FEWEST)) // max(rows, 1))


def logprobs_of(
    hidden: jax.Array,
    targets: jax.Array,
    weight: jax.Array,
    temperature: float | jax.Array,
    *,
    width: int,
    cap: float,
    first: jax.Array | int = 0,
    names: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """hidden [B, T, D], targets [B, T], weight [V, D] -> (logp, entropy), both float32 [B, T].

    `width` tokens of each row are unembedded at a time. On a device that has a part of the
    vocabulary, `first` is its first token, and the mesh axes `names` have the others.
    """
    batch, length = targets.shape
    n_chunks = -(-length // width)
    width = -(-length // n_chunks)  # chunks of one size, with next to no padding
    padding = n_chunks * width - length
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)))
    # Chunks go along T: a chunk then has all rows.
    hidden = hidden.reshape(batch, n_chunks, width, -1).swapaxes(0, 1)
    targets = targets.reshape(batch, n_chunks, width).swapaxes(0, 1)

    def one_chunk(weight: jax.Array, hidden: jax.Array, targets: jax.Array):
        logits = jnp.einsum(
            "btd,vd->btv", hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32
        )
        return pick(softcap(logits, cap) / temperature, targets, first=first, names=names)

    # With a single chunk all logits exist at once anyway: nothing is saved by making them again.
    chunk_fn = one_chunk if n_chunks == 1 else jax.checkpoint(one_chunk)
    _, (logp, entropy) = lax.scan(
        lambda carry, xs: (carry, chunk_fn(weight, *xs)), None, (hidden, targets)
    )
    logp, entropy = (x.swapaxes(0, 1).reshape(batch, -1)[:, :length] for x in (logp, entropy))
    return logp, entropy


def logprobs_on_mesh(
    hidden: jax.Array,
    targets: jax.Array,
    weight: jax.Array,
    temperature: float | jax.Array,
    spread: Spread,
    *,
    chunk: int,
    cap: float,
) -> tuple[jax.Array, jax.Array]:
    """`logprobs_of` for hidden states of the residual stream and a weight split over a mesh;
    about `chunk` tokens of the batch are unembedded at a time (`chunk_width`).

    The weight is gathered once, and its gradient scattered once, for all chunks.
    """
    axes, rows = ("vocab", "embed"), ("batch", "length")
    names = mesh_axes(spread.rules.spec(("vocab",))[0])
    shards = spread.parts("batch")
    width = chunk_width(chunk, targets.shape[0] // shards, shards * spread.parts("length"))

    def local(hidden: jax.Array, targets: jax.Array, weight: jax.Array, temperature: jax.Array):
        hidden = gather_stream(hidden, spread)
        weight = gather_embed(weight, axes, spread, hidden.dtype)
        first = first_of(weight, spread, "vocab")
        return logprobs_of(
            hidden, targets, weight, temperature, width=width, cap=cap, first=first, names=names
        )

    inputs = (("batch", "residual", None), rows, axes, ())
    run = run_local(local, spread, inputs, (rows, rows))
    return run(hidden, targets, weight, jnp.asarray(temperature, jnp.float32))


def pick(
    logits: jax.Array,
    targets: jax.Array,
    *,
    first: jax.Array | int = 0,
    names: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """logits float32 [..., V], targets [...] -> (log softmax at the targets, entropy).

    The mesh axes `names` have the other parts of the vocabulary, whose part here begins at `first`.
    """

    def total(x: jax.Array) -> jax.Array:
        return lax.psum(x, names) if names else x

    top = lax.stop_gradient(jnp.max(logits, axis=-1))
    top = lax.pmax(top, names) if names else top
    normaliser = top + jnp.log(total(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1)))
    # A comparison instead of a gather: its gradient is no scatter.
    hit = first + jnp.arange(logits.shape[-1]) == targets[..., None]
    logp = total(jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)) - normaliser
    fixed, fixed_normaliser = lax.stop_gradient((logits, normaliser))
    probs = jnp.exp(fixed - fixed_normaliser[..., None])
    return logp, fixed_normaliser - total(jnp.sum(probs * fixed, axis=-1))

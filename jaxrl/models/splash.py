"""Causal attention on TPU by the splash attention kernel of JAX.

The kernel skips blocks that a causal mask or a window hides, and never writes scores to memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.models.spread import Spread

_LANES = 128  # what lengths of blocks are multiples of
_BLOCKS = (512, 256, _LANES)
_WIDTHS = (64, _LANES)  # of heads; more are padded to a multiple of the last one


def splash_fits(length: int, parts: int) -> bool:
    """Whether the kernel can take rows of `length` tokens that are split over `parts` devices.

    Whole rows are padded; parts cannot be, as their tokens would no longer be neighbours.
    """
    return parts == 1 or length % (_LANES * parts) == 0


def splash_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    spread: Spread,
    *,
    window: int = 0,
    scale: float | None = None,
    cap: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """query [B, T, N, H], key and value [B, T, K, H], segment_ids [B, T] -> [B, T, N, H].

    As `attention.attend` with `attention.causal_mask`. Where the length is split, every device
    gathers the keys and values of the others. `interpret` runs the kernel without a TPU, slowly.
    """
    heads = spread.spec(("batch", "length", "heads", "head_dim"))
    kv_heads = spread.spec(("batch", "length", "kv_heads", "head_dim"))
    rows = spread.spec(("batch", "length"))
    parts, length = spread.parts("length"), query.shape[1]
    padding = -length % _LANES
    local_heads = query.shape[2] // spread.parts("heads")
    kernel = _kernel(length + padding, local_heads, window, cap, parts, interpret)
    by_query = NamedSharding(spread.mesh, PartitionSpec(None, rows[1]))
    width = query.shape[-1]
    factor = width**-0.5 if scale is None else scale

    def local(
        kernel: Any, query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array
    ) -> jax.Array:
        everywhere = segments
        if parts > 1:
            key, value, everywhere = (
                lax.all_gather(x, rows[1], axis=1, tiled=True) for x in (key, value, segments)
            )
        sides = (_padded(x, padding).swapaxes(1, 2) for x in (query * factor, key, value))
        # The end of a row is padded: no earlier token sees it.
        ends = (jnp.pad(x, ((0, 0), (0, padding))) for x in (segments, everywhere))
        mixed = jax.vmap(kernel)(*sides, _segments(*ends))
        return mixed.swapaxes(1, 2)[:, : mixed.shape[2] - padding, :, :width]

    run = jax.shard_map(
        local,
        mesh=spread.mesh,
        in_specs=(kernel.manual_sharding_spec(by_query), heads, kv_heads, kv_heads, rows),
        out_specs=heads,
        check_vma=False,
    )
    return run(kernel, query, key, value, segment_ids)


def _padded(x: jax.Array, length: int) -> jax.Array:
    """x [B, T, N, H] with `length` more tokens, and heads of a width that the kernel takes."""
    width = next((w for w in _WIDTHS if x.shape[-1] <= w), -(-x.shape[-1] // _LANES) * _LANES)
    return jnp.pad(x, ((0, 0), (0, length), (0, 0), (0, width - x.shape[-1])))


def _segments(query: jax.Array, keys: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return splash.SegmentIds(q=query, kv=keys)


@functools.lru_cache(maxsize=32)
def _kernel(length: int, heads: int, window: int, cap: float, parts: int, interpret: bool) -> Any:
    """The kernel for rows of `length` tokens; its blocks of queries are split over `parts`."""
    # Pallas takes a second to import, and is of use here only.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (length, length)
    mask = splash.LocalMask(shape, (window - 1, 0), 0) if window else splash.CausalMask(shape)
    rows = next(size for size in _BLOCKS if length // parts % size == 0)
    columns = next(size for size in _BLOCKS if length % size == 0)
    sizes = splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=parts,
            attn_logits_soft_cap=cap or None,
            interpret=interpret,
        )
        # Of numpy, so that it belongs to no device and to no trace.
        return jax.tree.map(np.asarray, kernel)

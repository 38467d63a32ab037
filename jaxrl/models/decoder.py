"""The decoder in Flax NNX: one forward for all families, which differ by `ModelConfig` alone.

Einsum letters: B batch, T query, S key, D model, N heads, K kv heads, H head width, F mlp, V vocab,
E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models import attention as ops
from jaxrl.models.chunked import attend_after
from jaxrl.models.experts import Experts
from jaxrl.models.layers import MLP, Context, Declare, Projections, RMSNorm
from jaxrl.models.parallel import look_up
from jaxrl.models.ring import ring_attend
from jaxrl.models.rope import apply_rope
from jaxrl.models.splash import splash_attend

if TYPE_CHECKING:
    from jaxrl.config import ModelConfig


class KVCache(NamedTuple):
    """Keys and values of every layer: tuples of [B, K, S, H], or [L, B, K, S, H] when layers are
    scanned."""

    keys: tuple[jax.Array, ...] | jax.Array
    values: tuple[jax.Array, ...] | jax.Array

    @property
    def length(self) -> int:
        """S, the number of entries of each row."""
        return jax.tree.leaves(self.keys)[0].shape[-2]


@dataclasses.dataclass(frozen=True)
class Place:
    """Which layer it is: `index` where `cache` holds all layers (scanned), and what it sees."""

    windowed: bool | jax.Array = False
    index: jax.Array | None = None


class Attention(Projections):
    """Grouped-query self-attention with rotary positions and, if asked for, normed queries and
    keys."""

    def __init__(self, config: ModelConfig, declare: Declare):
        n, k, h = config.n_heads, config.n_kv_heads, config.head_dim
        embed = {"embed": config.d_model}
        heads, kv_heads = {"heads": n, "head_dim": h}, {"kv_heads": k, "head_dim": h}
        self.declare_map("query", heads, embed, config, declare)
        self.declare_map("key", kv_heads, embed, config, declare)
        self.declare_map("value", kv_heads, embed, config, declare)
        # 2 * n_layers outputs add up in the residual stream: each gets its share of the variance.
        out_std = (n * h * 2 * config.n_layers) ** -0.5
        self.declare_map("out", embed, heads, config, declare, std=out_std)
        if config.qkv_bias:
            self.query_bias = declare((n, h), ("heads", "head_dim"), std=0.0)
            self.key_bias = declare((k, h), ("kv_heads", "head_dim"), std=0.0)
            self.value_bias = declare((k, h), ("kv_heads", "head_dim"), std=0.0)
        if config.qk_norm:
            self.query_norm = RMSNorm(h, config, declare)
            self.key_norm = RMSNorm(h, config, declare)
        self.config = config

    def __call__(
        self, x: jax.Array, context: Context, cache: tuple | None, place: Place
    ) -> tuple[jax.Array, tuple | None]:
        """x [B, T, D] -> (output [B, T, D], the cache (keys, values) with this call's tokens, or,
        after a prior, these alone)."""
        pin, sight, config = context.constrain, context.sight(place.windowed), self.config
        query, key, value = self._heads(x, context)
        if config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query = pin(apply_rope(query, sight.cos, sight.sin), _HEADS)
        key = pin(apply_rope(key, sight.cos, sight.sin), _KV_HEADS)
        value = pin(value, _KV_HEADS)
        if context.prior is not None:
            mixed, cache = self._after(query, key, value, context, cache, place)
            return self._out(mixed, context), cache
        if cache is None:
            mixed = self._row(query, key, value, context, place)
            return self._out(mixed, context), None
        cache = (
            ops.write_cache(cache[0], key, context.slots, place.index),
            ops.write_cache(cache[1], value, context.slots, place.index),
        )
        keys, values = (_visible(side, context.attend_length, place.index) for side in cache)
        mixed = ops.attend(query, keys, values, sight.mask, **self._scoring())
        return self._out(mixed, context), cache

    def _scoring(self) -> dict[str, float | None]:
        """How scores are made of products: `scale` and `cap`."""
        config = self.config
        scale = config.query_scale**-0.5 if config.query_scale else None
        return {"scale": scale, "cap": config.attention_softcap}

    def _out(self, mixed: jax.Array, context: Context) -> jax.Array:
        """mixed [B, T, N, H] -> [B, T, D]."""
        return self.fan_in("out", context.constrain(mixed, _HEADS), context)

    def _row(
        self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context, place: Place
    ) -> jax.Array:
        """Attention of rows over themselves -> mixed values [B, T, N, H]."""
        sight, size = context.sight(place.windowed), self.config.sliding_window
        scoring = self._scoring()
        if context.attention == "plain":
            keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
            causal = {"causal": context.causal, "window": sight.window}
            return ops.attend(query, keys, values, sight.mask, **causal, **scoring)
        args = (query, key, value, context.segment_ids, context.spread)
        if context.attention == "ring":
            window = _window(size, place.windowed)
            # Of scanned layers, some see everything.
            widest = size if place.windowed is True else 0
            return ring_attend(*args, window=window, widest=widest, **scoring)
        if isinstance(place.windowed, bool):
            return splash_attend(*args, window=size * place.windowed, **scoring)
        # The blocks that a kernel skips are fixed in it.
        near, far = (
            lambda *arrays, w=w: splash_attend(*arrays, *args[3:], window=w, **scoring)
            for w in (size, 0)
        )
        return jax.lax.cond(place.windowed, near, far, *args[:3])

    def _after(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        context: Context,
        cache: tuple,
        place: Place,
    ) -> tuple[jax.Array, tuple]:
        """Attention of a piece after `context.prior` -> (mixed values, the piece's own cache)."""
        config, sight = self.config, context.sight(place.windowed)
        own = key.swapaxes(1, 2).astype(cache[0].dtype), value.swapaxes(1, 2).astype(cache[1].dtype)
        mixed = attend_after(
            query,
            own,
            sight.mask,
            cache,
            context.prior,
            layer=place.index,
            window=_window(config.sliding_window, place.windowed),
            **self._scoring(),
        )
        return mixed, own

    def _heads(self, x: jax.Array, context: Context) -> list[jax.Array]:
        """x [B, T, D] -> queries [B, T, N, H], keys and values [B, T, K, H]."""
        names = ("query", "key", "value")
        heads = self.fan_out(names, x, context)
        if not self.config.qkv_bias:
            return heads
        biases = (getattr(self, f"{name}_bias")[...].astype(x.dtype) for name in names)
        return [y + bias for y, bias in zip(heads, biases, strict=True)]


def _window(size: int, windowed: bool | jax.Array) -> int | jax.Array:
    """The window of a layer, 0 for none."""
    return size * windowed if size else 0


_HEADS = ("batch", "length", "heads", "head_dim")
_KV_HEADS = ("batch", "length", "kv_heads", "head_dim")


def _visible(cache: jax.Array, length: int, layer: jax.Array | None) -> jax.Array:
    """The first `length` entries of one layer's cache: [B, K, length, H]."""
    if layer is not None:
        cache = jax.lax.dynamic_index_in_dim(cache, layer, 0, keepdims=False)
    return cache[:, :, :length]


class Block(nnx.Module):
    """One layer: attention and MLP (or experts), each on normed input and added to the residual
    stream, with `post_norms` normed once more before that."""

    def __init__(self, config: ModelConfig, declare: Declare):
        self.attention_norm = RMSNorm(config.d_model, config, declare)
        self.attention = Attention(config, declare)
        self.mlp_norm = RMSNorm(config.d_model, config, declare)
        self.mlp = (Experts if config.n_experts else MLP)(config, declare)
        if config.post_norms:
            self.attention_post_norm = RMSNorm(config.d_model, config, declare)
            self.mlp_post_norm = RMSNorm(config.d_model, config, declare)
        self.post_norms = config.post_norms

    def __call__(
        self, x: jax.Array, context: Context, cache: tuple | None, place: Place
    ) -> tuple[jax.Array, tuple | None]:
        """x [B, T, D] -> (x [B, T, D], cache)."""
        mixed, cache = self.attention(self.attention_norm(x), context, cache, place)
        if self.post_norms:
            mixed = self.attention_post_norm(mixed)
        x = context.constrain(x + mixed, _RESIDUAL)
        inner = self.mlp(self.mlp_norm(x), context)
        if self.post_norms:
            inner = self.mlp_post_norm(inner)
        return context.constrain(x + inner, _RESIDUAL), cache


_RESIDUAL = ("batch", "residual", None)
_KEPT = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
"""What each `remat` keeps of a layer for the backward pass; None: nothing."""


class Decoder(nnx.Module):
    """Token embedding, layers and final norm; logits are made by `model.unembed`."""

    def __init__(self, config: ModelConfig):
        declare = Declare(config.param_dtype)
        shape, axes = (config.vocab_size, config.d_model), ("vocab", "embed")
        self.embedding = declare(shape, axes, std=config.d_model**-0.5)
        if not config.tie_embeddings:
            self.unembedding = declare(shape, axes, std=config.d_model**-0.5)
        if config.scan_layers:
            self.layers = Block(config, dataclasses.replace(declare, layers=config.n_layers))
        else:
            self.layers = nnx.List([Block(config, declare) for _ in range(config.n_layers)])
        self.final_norm = RMSNorm(config.d_model, config, declare)
        self.config = config

    def __call__(
        self, tokens: jax.Array, context: Context, cache: KVCache | None
    ) -> tuple[jax.Array, KVCache | None]:
        """tokens [B, T] -> (hidden [B, T, D] after the final norm, the cache)."""
        x = self._embed(tokens, context)
        if self.config.scale_embedding:
            # The factor is rounded to the dtype, as where the models were trained.
            x *= jnp.asarray(self.config.d_model**0.5, x.dtype)
        run = self._scanned if self.config.scan_layers else self._unrolled
        x, cache = run(x, context, cache)
        return self.final_norm(x), cache

    def _embed(self, tokens: jax.Array, context: Context) -> jax.Array:
        """tokens [B, T] -> [B, T, D] in the dtype of the computation."""
        table, dtype = self.embedding[...], self.config.dtype
        if context.streamed:
            return look_up(table, tokens, context.spread, dtype)
        # Gathering the table's width first costs one weight; without it the compiler moves
        # activations.
        table = context.constrain(table, ("vocab", None))
        return context.constrain(table.astype(dtype)[tokens], _RESIDUAL)

    def _unrolled(self, x: jax.Array, context: Context, cache: KVCache | None):
        written = []
        for i, block in enumerate(self.layers):
            side = None if cache is None else (cache.keys[i], cache.values[i])
            graphdef, weights = nnx.split(block)
            place = Place(self.config.windowed(i))

            def step(x, weights, side, graphdef=graphdef, place=place):
                return nnx.merge(graphdef, weights)(x, context, side, place)

            x, side = self._remat(step)(x, weights, side)
            written.append(side)
        if cache is None:
            return x, None
        return x, KVCache(tuple(k for k, _ in written), tuple(v for _, v in written))

    def _scanned(self, x: jax.Array, context: Context, cache: KVCache | None):
        graphdef, weights = nnx.split(self.layers)
        windowed = [self.config.windowed(i) for i in range(self.config.n_layers)]

        def step(carry, layer):
            # The whole cache is carried and written in place; as scan's xs and ys it would be
            # copied.
            x, side = carry
            index, flag, weights = layer
            place = Place(windowed[0] if len(set(windowed)) == 1 else flag, index)
            x, written = nnx.merge(graphdef, weights)(x, context, side, place)
            # A piece's own entries are small and collected; the cache before it stays as it is.
            return ((x, side), written) if context.prior else ((x, written), None)

        side = None if cache is None else (cache.keys, cache.values)
        layers = (jnp.arange(self.config.n_layers), jnp.array(windowed), weights)
        (x, side), pieces = jax.lax.scan(self._remat(step), (x, side), layers)
        if context.prior:
            side = pieces
        return x, None if side is None else KVCache(*side)

    def _remat(self, step: Callable) -> Callable:
        if self.config.remat == "none":
            return step
        policy = _KEPT[self.config.remat]
        return jax.checkpoint(step, prevent_cse=not self.config.scan_layers, policy=policy)

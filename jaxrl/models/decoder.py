"""The decoder of Llama and Qwen3 in Flax NNX: modules that only hold weights and one forward.

Weights are declared, not made: each is a `jax.ShapeDtypeStruct` with its logical axes and the mean
and spread of its initial values as metadata. `model.build_model` splits them off once, and real
arrays are merged in at each call. Modules keep no state besides: the KV cache is an argument.
Einsum letters: B batch, T query, S key, D model, N heads, K kv heads, H head width, F mlp, V vocab.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models import attention as ops
from jaxrl.models.linear import linear

if TYPE_CHECKING:
    from jaxrl.config import ModelConfig

Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]
"""(activation, logical axis per dimension) -> the activation with its sharding pinned."""


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
class Context:
    """What every layer needs to know about the tokens of this call.

    cos, sin float32 [B, T, H/2]; mask bool [B or 1, T, S]; `causal`: S = T, the mask hides later
    entries, and T is not split over devices. With a cache: `slots` [B, T] are the
    entries that the tokens are written to, and queries see the first `attend_length` entries.
    """

    cos: jax.Array
    sin: jax.Array
    mask: jax.Array
    constrain: Constrain
    slots: jax.Array | None = None
    attend_length: int = 0
    causal: bool = False


@dataclasses.dataclass(frozen=True)
class Declare:
    """Declares the weights of one module; `layers` > 0 puts an axis for scanned layers in front."""

    dtype: str
    layers: int = 0

    def __call__(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], *, mean: float = 0.0, std: float
    ) -> nnx.Param:
        """A weight without a value; initial values are normal with `mean` and `std`."""
        if self.layers:
            shape, axes = (self.layers, *shape), ("layers", *axes)
        abstract = jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
        # Not eager: logical names are no mesh axes, and the mesh is not known here.
        return nnx.Param(abstract, out_sharding=axes, eager_sharding=False, mean=mean, std=std)


class RMSNorm(nnx.Module):
    """Zhang & Sennrich 2019, eq. 4, over the last axis; computed in float32."""

    def __init__(self, width: int, eps: float, declare: Declare):
        self.eps = eps
        # Not split: gathering a few numbers for each use would cost more than it saves.
        self.scale = declare((width,), (None,), mean=1.0, std=0.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> [..., D] in the dtype of x."""
        wide = x.astype(jnp.float32)
        rms = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * rms * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions and, if asked for, normed queries and
    keys."""

    def __init__(self, config: ModelConfig, declare: Declare):
        d, n, k, h = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        kv_axes = ("kv_heads", "head_dim", "embed")
        self.query = declare((n, h, d), ("heads", "head_dim", "embed"), std=d**-0.5)
        self.key = declare((k, h, d), kv_axes, std=d**-0.5)
        self.value = declare((k, h, d), kv_axes, std=d**-0.5)
        # 2 * n_layers outputs add up in the residual stream: each gets its share of the variance.
        out_std = (n * h * 2 * config.n_layers) ** -0.5
        self.out = declare((d, n, h), ("embed", "heads", "head_dim"), std=out_std)
        if config.qkv_bias:
            self.query_bias = declare((n, h), ("heads", "head_dim"), std=0.0)
            self.key_bias = declare((k, h), ("kv_heads", "head_dim"), std=0.0)
            self.value_bias = declare((k, h), ("kv_heads", "head_dim"), std=0.0)
        self.qkv_bias = config.qkv_bias
        if config.qk_norm:
            self.query_norm = RMSNorm(h, config.norm_eps, declare)
            self.key_norm = RMSNorm(h, config.norm_eps, declare)
        self.qk_norm = config.qk_norm

    def __call__(
        self, x: jax.Array, context: Context, cache: tuple | None, layer: jax.Array | None
    ) -> tuple[jax.Array, tuple | None]:
        """x [B, T, D] -> (output [B, T, D], the cache (keys, values) with this call's tokens)."""
        pin = context.constrain
        query, key, value = (_heads(x, w[...]) for w in (self.query, self.key, self.value))
        if self.qkv_bias:
            biases = (self.query_bias, self.key_bias, self.value_bias)
            query, key, value = (
                y + bias[...].astype(x.dtype)
                for y, bias in zip((query, key, value), biases, strict=True)
            )
        if self.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query = pin(ops.apply_rope(query, context.cos, context.sin), _HEADS)
        key = pin(ops.apply_rope(key, context.cos, context.sin), _KV_HEADS)
        value = pin(value, _KV_HEADS)
        if cache is None:
            keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
        else:
            cache = (
                ops.write_cache(cache[0], key, context.slots, layer),
                ops.write_cache(cache[1], value, context.slots, layer),
            )
            keys, values = (_visible(side, context.attend_length, layer) for side in cache)
        mixed = pin(ops.attend(query, keys, values, context.mask, causal=context.causal), _HEADS)
        return linear(
            mixed.reshape(*x.shape[:2], -1), self.out[...].reshape(x.shape[-1], -1)
        ), cache


_HEADS = ("batch", "length", "heads", "head_dim")
_KV_HEADS = ("batch", "length", "kv_heads", "head_dim")


def _heads(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [B, T, D], weight [N, H, D] -> [B, T, N, H]."""
    n_heads, head_dim, width = weight.shape
    return linear(x, weight.reshape(-1, width)).reshape(*x.shape[:2], n_heads, head_dim)


def _visible(cache: jax.Array, length: int, layer: jax.Array | None) -> jax.Array:
    """The first `length` entries of one layer's cache: [B, K, length, H]."""
    if layer is not None:
        cache = jax.lax.dynamic_index_in_dim(cache, layer, 0, keepdims=False)
    return cache[:, :, :length]


class MLP(nnx.Module):
    """SwiGLU: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6."""

    def __init__(self, config: ModelConfig, declare: Declare):
        d, f = config.d_model, config.mlp_dim
        self.gate = declare((f, d), ("mlp", "embed"), std=d**-0.5)
        self.up = declare((f, d), ("mlp", "embed"), std=d**-0.5)
        self.down = declare((d, f), ("embed", "mlp"), std=(f * 2 * config.n_layers) ** -0.5)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        inner = jax.nn.silu(linear(x, self.gate[...])) * linear(x, self.up[...])
        return linear(context.constrain(inner, ("batch", "length", "mlp")), self.down[...])


class Block(nnx.Module):
    """One layer: attention and MLP, each on normed input and added to the residual stream."""

    def __init__(self, config: ModelConfig, declare: Declare):
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps, declare)
        self.attention = Attention(config, declare)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps, declare)
        self.mlp = MLP(config, declare)

    def __call__(
        self,
        x: jax.Array,
        context: Context,
        cache: tuple | None = None,
        layer: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple | None]:
        """x [B, T, D] -> (x [B, T, D], cache); `layer` is its index when `cache` holds all
        layers."""
        mixed, cache = self.attention(self.attention_norm(x), context, cache, layer)
        x = context.constrain(x + mixed, _RESIDUAL)
        x = context.constrain(x + self.mlp(self.mlp_norm(x), context), _RESIDUAL)
        return x, cache


_RESIDUAL = ("batch", "length", None)


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
        self.final_norm = RMSNorm(config.d_model, config.norm_eps, declare)
        self.config = config

    def __call__(
        self, tokens: jax.Array, context: Context, cache: KVCache | None
    ) -> tuple[jax.Array, KVCache | None]:
        """tokens [B, T] -> (hidden [B, T, D] after the final norm, the cache)."""
        # Gathering the table's width first costs one weight; without it the compiler moves
        # activations.
        table = context.constrain(self.embedding[...], ("vocab", None))
        x = context.constrain(table.astype(self.config.dtype)[tokens], _RESIDUAL)
        run = self._scanned if self.config.scan_layers else self._unrolled
        x, cache = run(x, context, cache)
        return self.final_norm(x), cache

    def _unrolled(self, x: jax.Array, context: Context, cache: KVCache | None):
        written = []
        for i, block in enumerate(self.layers):
            side = None if cache is None else (cache.keys[i], cache.values[i])
            graphdef, weights = nnx.split(block)

            def step(x, weights, side, graphdef=graphdef):
                return nnx.merge(graphdef, weights)(x, context, side)

            x, side = self._remat(step)(x, weights, side)
            written.append(side)
        if cache is None:
            return x, None
        return x, KVCache(tuple(k for k, _ in written), tuple(v for _, v in written))

    def _scanned(self, x: jax.Array, context: Context, cache: KVCache | None):
        graphdef, weights = nnx.split(self.layers)

        def step(carry, layer):
            # The whole cache is carried and written in place; as scan's xs and ys it would be
            # copied.
            x, side = carry
            index, weights = layer
            return nnx.merge(graphdef, weights)(x, context, side, index), None

        side = None if cache is None else (cache.keys, cache.values)
        layers = (jnp.arange(self.config.n_layers), weights)
        (x, side), _ = jax.lax.scan(self._remat(step), (x, side), layers)
        return x, None if side is None else KVCache(*side)

    def _remat(self, step: Callable) -> Callable:
        if self.config.remat == "none":
            return step
        return jax.checkpoint(step, prevent_cse=not self.config.scan_layers)

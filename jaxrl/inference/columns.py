"""The decode step for CPUs: the same arithmetic as `models.forward`, with one column per slot.

With a few rows, a CPU's matrix product spends its time packing the weights. Weights [out, in] times
activations [in, B] take half as long as activations [B, in] times weights [in, out], so weights are
turned once per version. Attention goes head by head for the same reason. Tests hold this step to
the model's own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.inference.steps import NextLogits, Params
from jaxrl.models.attention import write_cache
from jaxrl.models.decoder import KVCache
from jaxrl.models.model import Model

_MASKED = -1e30
_ATTENTION = {"query", "key", "value", "out"}
_NORMS = {"query_norm", "key_norm"}


def supports(model: Model) -> bool:
    """Whether the model is one that this step knows: unrolled layers of attention and gated MLP."""
    config, tree = model.config, model.abstract
    if config.scan_layers:
        return False
    parts = {"attention_norm", "attention", "mlp_norm", "mlp"}
    attention = _ATTENTION | (_NORMS if config.qk_norm else set())
    return all(
        set(layer) == parts
        and set(layer["attention"]) == attention
        and set(layer["mlp"]) == {"gate", "up", "down"}
        for layer in tree["layers"].values()
    )


def turn_weights(model: Model, params: Params) -> Params:
    """params -> weights [out, in] in the compute dtype, what shares an input joined."""
    dtype, width = model.config.dtype, model.config.d_model

    def turned(*weights: jax.Array) -> jax.Array:
        """[D, …] each -> [sum of the rest, D]."""
        return jnp.concatenate([w.astype(dtype).reshape(width, -1).T for w in weights])

    def layer(weights: Params) -> Params:
        attention, mlp = weights["attention"], weights["mlp"]
        return {
            "attention_norm": weights["attention_norm"]["scale"],
            "mlp_norm": weights["mlp_norm"]["scale"],
            "qkv": turned(attention["query"], attention["key"], attention["value"]),
            "out": attention["out"].astype(dtype).reshape(-1, width).T,
            "gate_up": turned(mlp["gate"], mlp["up"]),
            "down": mlp["down"].astype(dtype).T,
            **{name: attention[name]["scale"] for name in sorted(_NORMS & set(attention))},
        }

    head = params["embedding" if model.config.tie_embeddings else "unembedding"]
    return {
        "embedding": params["embedding"].astype(dtype),
        "head": head.astype(dtype),
        "final_norm": params["final_norm"]["scale"],
        "layers": [layer(params["layers"][str(i)]) for i in range(model.config.n_layers)],
    }


def next_logits(model: Model, weights: Params) -> NextLogits:
    """(token [S], position [S], cache, alive bool [S]) -> (logits float32 [S, V], cache).

    `weights` are those of `turn_weights`.
    """
    config = model.config

    def step(
        token: jax.Array, position: jax.Array, cache: KVCache, alive: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        x = weights["embedding"][token].T
        turn = _angles(position, config.head_dim, config.rope_theta)
        seen = jnp.arange(cache.length) <= position[:, None]
        # An entry beyond the cache is dropped by the write, so the row stays untouched.
        entry = jnp.where(alive, position, cache.length)
        keys, values = [], []
        for layer, key, value in zip(weights["layers"], cache.keys, cache.values, strict=True):
            y = _norm(x, layer["attention_norm"], config.norm_eps)
            query, key, value = _project(config, layer, y, turn, key, value, entry)
            x = x + layer["out"] @ _attend(query, key, value, seen)
            y = layer["gate_up"] @ _norm(x, layer["mlp_norm"], config.norm_eps)
            gate, up = jnp.split(y, 2)
            x = x + layer["down"] @ (jax.nn.silu(gate) * up)
            keys.append(key)
            values.append(value)
        x = _norm(x, weights["final_norm"], config.norm_eps)
        logits = jnp.matmul(weights["head"], x, preferred_element_type=jnp.float32)
        # The barrier keeps the compiler from folding the transposition into a slower product.
        return lax.optimization_barrier(logits).T, KVCache(tuple(keys), tuple(values))

    return step


def _angles(position: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """position [B] -> (cos, sin) float32 [H/2, B] of position * theta^(-2i/H)."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = (1.0 / theta**exponents)[:, None] * position.astype(jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def _norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of x [..., D, B] over D, in float32; scale [D]."""
    wide = x.astype(jnp.float32)
    rms = lax.rsqrt(jnp.mean(wide * wide, axis=-2, keepdims=True) + eps)
    return (wide * rms * scale[:, None].astype(jnp.float32)).astype(x.dtype)


def _rotate(x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [N, H, B] -> the same with each pair (i, i + H/2) turned by the angles."""
    cos, sin = turn
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=1)
    halves = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(halves, axis=1).astype(x.dtype)


def _project(config, layer, x, turn, keys, values, entry):
    """x [D, B] -> (query [B, K, G, H], keys and values [B, K, S, H] with the new token in them)."""
    n_heads, n_kv, width = config.n_heads, config.n_kv_heads, config.head_dim
    joined = (layer["qkv"] @ x).reshape(-1, width, x.shape[1])
    query, key, value = jnp.split(joined, [n_heads, n_heads + n_kv])
    if config.qk_norm:
        query = _norm(query, layer["query_norm"], config.norm_eps)
        key = _norm(key, layer["key_norm"], config.norm_eps)
    query, key = _rotate(query, turn), _rotate(key, turn)
    keys, values = (
        write_cache(cache, new.transpose(2, 0, 1)[:, None], entry[:, None])
        for cache, new in ((keys, key), (values, value))
    )
    query = query.transpose(2, 0, 1).reshape(-1, n_kv, n_heads // n_kv, width)
    return query, keys, values


def _attend(query: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> jax.Array:
    """query [B, K, G, H], keys and values [B, K, S, H], seen bool [B, S] -> [N * H, B]."""
    batch, _, groups, width = query.shape
    mixed = []
    for g in range(groups):
        # One matrix-vector product per row and head reads the cache in place.
        scores = jnp.einsum(
            "bkh,bksh->bks", query[:, :, g], keys, preferred_element_type=jnp.float32
        )
        scores = jnp.where(seen[:, None], scores * width**-0.5, _MASKED)
        shares = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        mixed.append(jnp.einsum("bks,bksh->bkh", shares, values))
    return jnp.stack(mixed, axis=2).reshape(batch, -1).T

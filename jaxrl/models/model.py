"""Models at the edge: plain dicts of weights in, arrays out; everything here can be jitted.

`params` is a nested dict of arrays with string keys, and the same tree everywhere. One `forward`
serves training, prefill and decode, so that rollout and training log-probabilities agree by
construction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxrl.models import attention as ops
from jaxrl.models.chunked import Prior
from jaxrl.models.decoder import Decoder, KVCache
from jaxrl.models.layers import Context
from jaxrl.models.linear import linear
from jaxrl.models.logprobs import chunk_width, logprobs_of, logprobs_on_mesh
from jaxrl.models.sight import row_context, sights
from jaxrl.models.spread import spread_over
from jaxrl.sharding import DEFAULT_RULES, Rules, shardings_of

if TYPE_CHECKING:
    from jaxrl.config import ModelConfig

Params = dict[str, Any]
_CACHE_AXES = ("slots", "kv_heads", None, "head_dim")


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A decoder without its weights; compared and hashed by identity, so that jit may close over
    it.

    `graphdef` is the structure that `nnx.merge` needs. The trees have the structure of `params`:
    `abstract` holds `jax.ShapeDtypeStruct`, `axes` the logical axes, and `initial` the (mean, std)
    of the initial values.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    abstract: Params
    axes: Params
    initial: Params

    @property
    def n_params(self) -> int:
        """Number of weights."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.abstract))

    def shardings(self, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Params:
        """Tree of NamedSharding of the weights; `ValueError` if `mesh` cannot split them."""
        return shardings_of(self.abstract, mesh, rules, self.axes)


def build_model(config: ModelConfig) -> Model:
    """The model that `config` describes; allocates nothing. `ValueError` for impossible sizes."""
    _check_sizes(config)
    graphdef, state = nnx.split(Decoder(config), nnx.Param)
    abstract, axes, initial = {}, {}, {}
    for path, variable in nnx.to_flat_state(state):
        metadata = variable.get_metadata()
        _set(abstract, path, variable.get_value())
        _set(axes, path, metadata["out_sharding"])
        _set(initial, path, (metadata["mean"], metadata["std"]))
    return Model(config, graphdef, abstract, axes, initial)


def init_params(
    model: Model,
    seed: int,
    *,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    given: Params | None = None,
) -> Params:
    """Random initial weights on `mesh` (on the default device without one).

    Weights in `given`, a part of the tree, are taken as they are: of a model with adapters, those
    that it starts from. The numbers depend on `seed` and the name of the weight alone: not on the
    mesh, the backend, or whether layers are scanned. They are drawn on the host, one weight at a
    time, because compiling a generator for every shape takes longer than the drawing.
    """
    shardings = None if mesh is None else model.shardings(mesh, rules)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(model.abstract)
    initial = treedef.flatten_up_to(model.initial)
    targets = [None] * len(leaves) if mesh is None else treedef.flatten_up_to(shardings)
    there = {} if given is None else dict(jax.tree_util.tree_leaves_with_path(given))
    weights = []
    for (path, leaf), (mean, std), target in zip(leaves, initial, targets, strict=True):
        if path in there:
            weights.append(there[path])
            continue
        names = [key.key for key in path]
        value = _draw(names, leaf.shape, mean, std, seed, model.config.scan_layers)
        value = value.astype(leaf.dtype)
        if target is None:
            weights.append(jnp.array(value))
        else:
            take = functools.partial(operator.getitem, value)
            weights.append(jax.make_array_from_callback(leaf.shape, target, take))
    return treedef.unflatten(weights)


def _draw(
    names: list[str], shape: tuple[int, ...], mean: float, std: float, seed: int, scanned: bool
) -> np.ndarray:
    """Initial float32 values of the weight at the path `names`; scanned layers are drawn one by
    one."""
    if scanned and names[0] == "layers":
        layers = ([names[0], str(i), *names[1:]] for i in range(shape[0]))
        return np.stack([_draw(layer, shape[1:], mean, std, seed, False) for layer in layers])
    # Philox is a counter-based generator: unrelated keys give unrelated streams.
    rng = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32("/".join(names).encode())]))
    return mean + std * rng.standard_normal(shape, dtype=np.float32)


def init_cache(
    model: Model,
    batch: int,
    length: int,
    *,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> KVCache:
    """An empty cache of `batch` rows with room for `length` tokens each, in the compute dtype."""
    config = model.config
    shape = (batch, config.n_kv_heads, length, config.head_dim)
    if config.scan_layers:
        axes = ("layers", *_CACHE_AXES)
        side = jax.ShapeDtypeStruct((config.n_layers, *shape), config.dtype)
    else:
        axes = _CACHE_AXES
        side = (jax.ShapeDtypeStruct(shape, config.dtype),) * config.n_layers
    abstract = KVCache(side, side)
    shardings = None
    if mesh is not None:
        shardings = shardings_of(abstract, mesh, rules, lambda path, leaf: axes)

    def empty() -> KVCache:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)

    return jax.jit(empty, out_shardings=shardings)()


def forward(
    model: Model,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array | None = None,
    cache: KVCache | None = None,
    *,
    attend_length: int | None = None,
    write_mask: jax.Array | None = None,
    prior: Prior | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> tuple[jax.Array, KVCache | None]:
    """tokens, positions int32 [B, T] -> (hidden [B, T, D] after the final norm, cache or None).

    Without a cache (training): a token sees itself and earlier tokens of the row with its own
    `segment_ids` [B, T] (None: the whole row is one segment).

    With a cache (prefill and decode): keys and values of row b, token t are written to entry
    `positions[b, t]`, then each token sees the entries up to its own position. `attend_length`
    (static) promises that no position reaches it, and saves reading the rest of the cache. Rows
    where `write_mask` bool [B] is False keep their cache as it is; their hidden states mean
    nothing.

    With a cache and a `prior` (a piece of a prompt): the cache is only read, each token sees what
    `prior` says and the tokens before it in its row, and what comes back is a cache of these tokens
    alone, [B, K, T, H] a layer. `positions` then are those after the prior.

    With a mesh, activations are pinned to it: without that the compiler moves whole batches around.
    Raises `ValueError` for a cache together with segments and for impossible lengths.
    """
    chex.assert_rank([tokens, positions], 2)
    chex.assert_equal_shape([tokens, positions])
    config = model.config
    cached = cache is not None and prior is None
    spread = spread_over(mesh, rules, *tokens.shape, cached=cached, streamed=cache is None)
    if cache is None:
        if attend_length is not None or write_mask is not None:
            raise ValueError("attend_length and write_mask need a cache")
        context = row_context(config, positions, segment_ids, spread)
    elif prior is not None:
        make_mask = functools.partial(ops.causal_mask, tokens.shape[1], None)
        context = Context(*sights(config, positions, make_mask), spread, prior=prior)
    else:
        if segment_ids is not None:
            raise ValueError("segment_ids cannot be combined with a cache: one row is one sequence")
        seen = _attend_length(attend_length, cache.length, tokens.shape[1])
        slots = positions
        if write_mask is not None:
            # An entry beyond the cache is dropped by the write, so the row stays untouched.
            slots = jnp.where(write_mask[:, None], positions, cache.length)
        make_mask = functools.partial(ops.cache_mask, positions, seen)
        context = Context(*sights(config, positions, make_mask), spread, slots, seen)
    return _merge(model, params)(tokens, context, cache)


def unembed(model: Model, params: Params, hidden: jax.Array) -> jax.Array:
    """hidden [..., D] -> logits float32 [..., V]."""
    rows = hidden.reshape(1, -1, hidden.shape[-1])
    logits = linear(rows, _unembedding(model, params), out_dtype=jnp.float32)
    logits = ops.softcap(logits, model.config.logits_softcap)
    return logits.reshape(*hidden.shape[:-1], -1)


def token_logprobs(
    model: Model,
    params: Params,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int = 256,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> tuple[jax.Array, jax.Array]:
    """hidden [B, T, D], targets [B, T] -> (logp of the targets, entropy), both float32 [B, T].

    The distribution is softmax(logits / temperature). About `chunk` tokens of the batch (on each
    device of a mesh at least 256, or `chunk`) are unembedded at a time and their logits made again
    for the gradient, so that nothing of size B*T*V ever exists (unless one chunk takes all tokens).
    The entropy (nats) carries no gradient.
    """
    chex.assert_equal_shape_prefix([hidden, targets], 2)
    batch, length = targets.shape
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive")
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    weight, cap = _unembedding(model, params), model.config.logits_softcap
    spread = spread_over(mesh, rules, batch, length)
    if spread is None or mesh.size == 1:
        width = chunk_width(chunk, batch)
        return logprobs_of(hidden, targets, weight, temperature, width=width, cap=cap)
    return logprobs_on_mesh(hidden, targets, weight, temperature, spread, chunk=chunk, cap=cap)


def sequence_logprobs(
    model: Model,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array | None,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int = 256,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> tuple[jax.Array, jax.Array]:
    """tokens, positions, segment_ids int32 [B, T] -> (logp, entropy), both float32 [B, T].

    Index i describes token i given the tokens before it in its segment. The first token of each
    segment and padding (segment 0) have nothing before them: 0 there, without gradient.
    """
    hidden, _ = forward(model, params, tokens, positions, segment_ids, mesh=mesh, rules=rules)
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    logp, entropy = token_logprobs(
        model, params, hidden, following,
        temperature=temperature, chunk=chunk, mesh=mesh, rules=rules,
    )  # fmt: skip
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    has_past = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)

    def shift(x: jax.Array) -> jax.Array:
        return jnp.pad(jnp.where(has_past, x[:, :-1], 0.0), ((0, 0), (1, 0)))

    return shift(logp), shift(entropy)


def stack_layers(params: Params) -> Params:
    """Weights of unrolled layers ("layers/0/…", …) -> those of scanned layers ("layers/…" [L,
    …])."""
    layers = params["layers"]
    ordered = [layers[str(i)] for i in range(len(layers))]
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *ordered)}


def unstack_layers(params: Params) -> Params:
    """The inverse of `stack_layers`."""
    layers = params["layers"]
    n_layers = jax.tree.leaves(layers)[0].shape[0]
    split = {str(i): jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(n_layers)}
    return {**params, "layers": split}


def _attend_length(attend_length: int | None, cache_length: int, n_tokens: int) -> int:
    """The checked number of cache entries that queries look at."""
    seen = cache_length if attend_length is None else attend_length
    if not n_tokens <= seen <= cache_length:
        raise ValueError(
            f"attend_length={seen} must lie between the {n_tokens} tokens of this call "
            f"and the cache's {cache_length} entries"
        )
    return seen


def _unembedding(model: Model, params: Params) -> jax.Array:
    """[V, D]: the embedding when tied, else a weight of its own."""
    return params["embedding" if model.config.tie_embeddings else "unembedding"]


def _merge(model: Model, params: Params) -> Decoder:
    """The module with its weights; list indices become integers again, as NNX orders by them."""
    return nnx.merge(model.graphdef, _index_keys(params))


def _string_keys(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {str(key): _string_keys(value) for key, value in tree.items()}


def _index_keys(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {int(k) if k.isdigit() else k: _index_keys(v) for k, v in tree.items()}


def _set(tree: Params, path: tuple, value: Any) -> None:
    """Put `value` at `path` (keys turned into strings), making the dicts on the way."""
    *parents, last = map(str, path)
    functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = value


def _check_sizes(config: ModelConfig) -> None:
    """What the arithmetic of the decoder needs; the config checks fields one by one."""
    for name in (
        "n_layers",
        "d_model",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "mlp_dim",
        "vocab_size",
    ):
        if getattr(config, name) < 1:
            hint = " (fill in the tokenizer's size first)" if name == "vocab_size" else ""
            raise ValueError(f"model.{name}={getattr(config, name)} must be positive{hint}")
    if config.n_heads % config.n_kv_heads:
        raise ValueError(
            f"model.n_heads={config.n_heads} must be a multiple of "
            f"model.n_kv_heads={config.n_kv_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"model.head_dim={config.head_dim} must be even: RoPE turns pairs")

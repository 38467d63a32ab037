"""Small models and token batches that the tests of this room share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import ModelConfig
from jaxrl.models.model import build_model, forward, init_params, sequence_logprobs

# Most tests share the shapes [2, 8] and these programs: compiling is what these tests take time
# for.
_run = jax.jit(forward, static_argnums=0, static_argnames=("attend_length", "mesh", "rules"))


_run_logprobs = jax.jit(
    sequence_logprobs, static_argnums=0, static_argnames=("chunk", "mesh", "rules")
)


@pytest.fixture(scope="session")
def run():
    """`forward`, jitted once for all tests."""
    return _run


@pytest.fixture(scope="session")
def run_logprobs():
    """`sequence_logprobs`, jitted once for all tests."""
    return _run_logprobs


@pytest.fixture(scope="session")
def make_model():
    """Function (**changes of the small config) -> (model, params); each variant is built once.

    Norm scales and biases are random, not 1 and 0, so that a forgotten or doubled one shows.
    """
    made = {}

    def make(**changes):
        key = str(sorted(changes.items()))
        if key not in made:
            sizes = {
                "n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8,
                "mlp_dim": 48, "vocab_size": 64, "max_length": 64,
            }  # fmt: skip
            model = build_model(ModelConfig(**{**sizes, **changes}))
            made[key] = (model, _random_scales(init_params(model, 0)))
        return made[key]

    return make


def _random_scales(params):
    def change(path, leaf):
        if not path[-1].key.endswith(("scale", "_bias")):
            return leaf
        rng = np.random.default_rng(sum(map(ord, jax.tree_util.keystr(path))))
        return jnp.array(leaf + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(change, params)


@pytest.fixture(scope="session")
def make_tokens():
    """Function (batch, length) -> (tokens, positions), both int32 [B, T]."""

    def make(batch, length, vocab_size=64, seed=0):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, vocab_size, (batch, length), dtype=np.int32)
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
        return jnp.array(tokens), jnp.array(positions)

    return make


@pytest.fixture(scope="session")
def packed_batch():
    """tokens, positions, segment_ids int32 [2, 8]: a row of 3 + 2 tokens and 3 padding, a row of
    8."""
    lengths = [[3, 2], [8]]
    tokens = np.zeros((2, 8), np.int32)
    positions, segment_ids = np.zeros_like(tokens), np.zeros_like(tokens)
    rng = np.random.default_rng(5)
    for row, segments in enumerate(lengths):
        start = 0
        for number, length in enumerate(segments, start=1):
            span = slice(start, start + length)
            tokens[row, span] = rng.integers(0, 64, length)
            positions[row, span] = np.arange(length)
            segment_ids[row, span] = number
            start += length
    return jnp.array(tokens), jnp.array(positions), jnp.array(segment_ids)

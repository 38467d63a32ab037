"""Windows, soft caps, extra norms and experts: in the cache, packed, scanned and on a mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl.config import ModelConfig
from jaxrl.models.dispatch import Weights
from jaxrl.models.experts import Experts
from jaxrl.models.layers import Declare
from jaxrl.models.model import build_model, forward, init_cache, sequence_logprobs, stack_layers
from jaxrl.sharding import DEFAULT_RULES, make_mesh, place

KINDS = {
    "gemma": {
        "n_layers": 3, "qk_norm": True, "activation": "gelu", "norm_offset": True,
        "post_norms": True, "scale_embedding": True, "sliding_window": 3, "global_every": 2,
        "local_rope_theta": 50.0, "attention_softcap": 1.0, "logits_softcap": 2.0,
        "query_scale": 5.0,
    },
    "windows only": {"sliding_window": 3},
    "experts": {"n_experts": 4},
}  # fmt: skip
KIND = pytest.mark.parametrize("kind", KINDS)


@KIND
def test_scanned_layers_equal_unrolled_ones(make_model, make_tokens, run, kind):
    model, params = make_model(**KINDS[kind])
    scanned = build_model(ModelConfig(**{**vars(model.config), "scan_layers": True}))

    got, _ = run(scanned, stack_layers(params), *make_tokens(2, 8))

    expected, _ = run(model, params, *make_tokens(2, 8))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@KIND
@pytest.mark.parametrize("scan_layers", [False, True])
def test_cache_filled_in_pieces_equals_full_forward(
    make_model, make_tokens, run, kind, scan_layers
):
    model, params = make_model(**KINDS[kind], scan_layers=scan_layers)
    tokens, positions = make_tokens(2, 16)
    expected, _ = run(model, params, tokens, positions)

    cache, hidden, start = init_cache(model, 2, 16), [], 0
    for piece in (8, 1, 1, 1, 1, 1, 1, 1, 1):
        span = slice(start, start + piece)
        out, cache = run(model, params, tokens[:, span], positions[:, span], None, cache)
        hidden.append(out)
        start += piece

    np.testing.assert_allclose(jnp.concatenate(hidden, 1), expected, rtol=0, atol=1e-5)


@KIND
def test_packed_segments_equal_separate_sequences(make_model, packed_batch, kind):
    model, params = make_model(**KINDS[kind])
    tokens, positions, segment_ids = packed_batch

    packed, _ = forward(model, params, tokens, positions, segment_ids)

    for row, start, stop in [(0, 0, 3), (0, 3, 5), (1, 0, 8)]:
        span = (slice(row, row + 1), slice(start, stop))
        alone, _ = forward(model, params, tokens[span], positions[span])
        np.testing.assert_allclose(packed[span], alone, rtol=0, atol=1e-5)


def test_window_hides_what_is_farther_away(make_model, make_tokens):
    model, params = make_model(n_layers=1, sliding_window=3)
    tokens, positions = make_tokens(1, 8)

    hidden, _ = forward(model, params, tokens, positions)
    changed, _ = forward(model, params, tokens.at[0, 2].add(1), positions)

    difference = np.abs(hidden - changed).max(axis=-1)[0]
    assert (difference[2:5] > 1e-3).all()
    np.testing.assert_array_equal(difference[[0, 1, 5, 6, 7]], 0)


@pytest.mark.parametrize("normalize", [True, False])
def test_experts_both_ways_of_computing_give_the_same_numbers_and_gradients(normalize):
    config = ModelConfig(
        d_model=16, mlp_dim=8, n_experts=6, experts_per_token=2, normalize_experts=normalize
    )
    graphdef, state = nnx.split(Experts(config, Declare("float32")))
    keys = iter(jax.random.split(jax.random.key(0), 9))
    weights = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), state)
    experts = nnx.merge(graphdef, weights)
    x = jax.random.normal(next(keys), (2, 5, 16))
    shares, chosen = experts._route(x, experts.router[...])
    target = jax.random.normal(next(keys), x.shape)
    weights = Weights(*(getattr(experts, name)[...] for name in Weights._fields))

    def value(way):
        def loss(x, shares, weights):
            return jnp.sum(way(x, shares, chosen, weights) * target)

        return jax.value_and_grad(loss, argnums=range(3))(x, shares, weights)

    got, expected = value(experts.chosen_experts), value(experts.every_expert)

    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=0)
    leaves = map(jax.tree.leaves, (got[1], expected[1]))
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "expert": 4},
        pytest.param({"fsdp": 2, "expert": 2, "expert_tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_on_a_mesh_equal_one_device(make_model, make_tokens, axes):
    model, params = make_model(n_layers=1, n_experts=4)
    mesh = make_mesh(**axes)
    tokens, positions = make_tokens(8, 8)

    def loss(params, mesh=None):
        logp, _ = sequence_logprobs(model, params, tokens, positions, None, mesh=mesh)
        return logp.mean()

    placed = place(params, mesh, DEFAULT_RULES, axes_of=model.axes)
    value, grads = jax.jit(jax.value_and_grad(functools.partial(loss, mesh=mesh)))(placed)

    expected, expected_grads = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), grads, expected_grads
    )
    router = grads["layers"]["0"]["mlp"]["router"]
    assert np.abs(router).max() > 1e-4

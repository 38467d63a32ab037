"""Scanned or unrolled, rematerialised or not: the numbers are the same; building allocates
nothing."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.models.model import (
    build_model,
    forward,
    init_params,
    stack_layers,
    unstack_layers,
)


def _names(tree) -> set[str]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat}


def _assert_close(actual, expected, atol):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), actual, expected)


@pytest.fixture(scope="module")
def value_and_grad(make_model, make_tokens):
    """Function (scan_layers, remat) -> (value, gradient in unrolled form), made once each."""
    tokens, positions = make_tokens(2, 8)
    _, params = make_model(qk_norm=True)
    weights = np.random.default_rng(0).normal(size=(2, 8, 32))

    @functools.cache
    def compute(scan_layers, remat):
        model, _ = make_model(qk_norm=True, scan_layers=scan_layers, remat=remat)
        loss = lambda params: (forward(model, params, tokens, positions)[0] * weights).mean()
        given = stack_layers(params) if scan_layers else params
        value, gradient = jax.jit(jax.value_and_grad(loss))(given)
        return value, unstack_layers(gradient) if scan_layers else gradient

    return compute


@pytest.mark.parametrize(
    ("scan_layers", "remat"),
    [
        pytest.param(False, "full", marks=pytest.mark.slow),
        pytest.param(True, "none", marks=pytest.mark.slow),
        (True, "full"),
    ],
)
def test_scan_and_remat_values_and_gradients_equal_the_plain_ones(
    value_and_grad, scan_layers, remat
):
    value, gradient = value_and_grad(scan_layers, remat)

    expected, expected_gradient = value_and_grad(False, "none")
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6)
    _assert_close(gradient, expected_gradient, atol=1e-6)


def test_scanned_equals_unrolled_with_more_than_ten_layers(make_model, make_tokens, run):
    unrolled, params = make_model(n_layers=11)
    scanned, _ = make_model(n_layers=11, scan_layers=True)
    tokens, positions = make_tokens(2, 8)

    hidden, _ = run(scanned, stack_layers(params), tokens, positions)

    expected, _ = forward(unrolled, params, tokens, positions)
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_remat_keeps_less_for_the_backward_pass(make_model, make_tokens, scan_layers):
    tokens, positions = make_tokens(4, 32)

    def saved(remat):
        model, params = make_model(scan_layers=scan_layers, n_layers=4, remat=remat)
        run = lambda p: forward(model, p, tokens, positions)[0].sum()
        residuals = jax.eval_shape(lambda p: jax.vjp(run, p)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(residuals))

    assert saved("full") < 0.5 * saved("none")


def test_stack_layers_orders_by_number_not_by_name(make_model):
    _, params = make_model(n_layers=11, qk_norm=True)

    stacked = stack_layers(params)

    for layer in (2, 10):
        expected = params["layers"][str(layer)]["mlp"]["gate"]
        np.testing.assert_array_equal(stacked["layers"]["mlp"]["gate"][layer], expected)
    _assert_close(unstack_layers(stacked), params, atol=0)


def test_init_params_same_numbers_scanned_and_unrolled(make_model):
    unrolled, _ = make_model()
    scanned, _ = make_model(scan_layers=True)

    _assert_close(init_params(scanned, 3), stack_layers(init_params(unrolled, 3)), atol=0)


def test_init_params_seed_decides_and_every_layer_differs(make_model):
    model, _ = make_model()

    first, again, other = (init_params(model, seed) for seed in (1, 1, 2))

    _assert_close(first, again, atol=0)
    gate = lambda params, layer: np.asarray(params["layers"][layer]["mlp"]["gate"])
    assert np.abs(gate(first, "0") - gate(other, "0")).max() > 0.01
    assert np.abs(gate(first, "0") - gate(first, "1")).max() > 0.01


def test_init_params_spread_follows_the_fan_in(make_model):
    model, _ = make_model(d_model=64, mlp_dim=256)

    params = init_params(model, 0)

    layer = params["layers"]["0"]
    np.testing.assert_allclose(np.std(layer["mlp"]["gate"]), 64**-0.5, rtol=0.05, atol=0)
    np.testing.assert_allclose(np.std(layer["mlp"]["down"]), (256 * 4) ** -0.5, rtol=0.05, atol=0)
    np.testing.assert_array_equal(layer["mlp_norm"]["scale"], np.ones(64))


@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": True, "tie_embeddings": False}, {"scan_layers": True}]
)
def test_build_model_abstract_axes_and_params_agree(make_model, changes):
    model, _ = make_model(**changes)

    params = init_params(model, 0)

    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(params) == shapes(model.abstract)
    axes = jax.tree.structure(params).flatten_up_to(model.axes)
    for leaf, names in zip(jax.tree.leaves(params), axes, strict=True):
        assert len(names) == leaf.ndim
    assert model.n_params == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model.abstract))


def test_build_model_weight_names_are_paths_of_strings(make_model):
    names = _names(make_model(qk_norm=True, tie_embeddings=False)[0].abstract)

    assert {"embedding", "unembedding", "final_norm/scale"} <= names
    assert {"layers/0/mlp/down", "layers/1/attention/query_norm/scale"} <= names
    assert "unembedding" not in _names(make_model()[0].abstract)


def test_forward_static_model_compiles_once_and_gives_plain_arrays(make_model, make_tokens, run):
    model, params = make_model()
    tokens, positions = make_tokens(2, 8)
    hidden, _ = run(model, params, tokens, positions)
    compiled = run._cache_size()

    run(model, params, tokens + 0, positions)

    assert run._cache_size() == compiled
    assert type(params) is dict
    assert {type(leaf) for leaf in jax.tree.leaves(params)} == {type(hidden)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 0}, "vocab_size=0.*tokenizer"),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_heads=4.*n_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7.*even"),
    ],
)
def test_build_model_impossible_sizes_are_errors(make_model, changes, words):
    config = make_model()[0].config

    # The config may refuse these sizes by itself; whoever comes first names value and rule.
    with pytest.raises(ValueError, match=words):
        build_model(dataclasses.replace(config, **changes))

"""Adapters: nothing at the start, the same as merged weights, and the chain rule's gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import ModelConfig, published_model
from jaxrl.errors import ConfigError
from jaxrl.models.lora import base_model, join_frozen, merge_adapters, split_frozen
from jaxrl.models.model import build_model, forward, init_params, sequence_logprobs
from jaxrl.models.safetensors import load_params, save_params
from jaxrl.sharding import DEFAULT_RULES, make_mesh, place

LORA = {"lora_rank": 3, "lora_alpha": 6.0}
VARIANTS = pytest.mark.parametrize(
    "changes", [{}, {"scan_layers": True}, {"lora_targets": ("query", "out", "down")}], ids=str
)


def _with_random_adapters(params):
    """B is 0 at the start: then nothing would show."""
    adapters, frozen = split_frozen(params)
    rng = np.random.default_rng(3)
    adapters = jax.tree.map(lambda x: jnp.array(0.1 * rng.normal(size=x.shape), x.dtype), adapters)
    return join_frozen(adapters, frozen)


@VARIANTS
def test_adapters_at_the_start_change_no_bit(make_tokens, run, make_model, changes):
    model, params = make_model(**LORA, **changes)
    _, frozen = split_frozen(params)

    with_adapters, _ = run(model, params, *make_tokens(2, 8))

    without, _ = run(base_model(model), frozen, *make_tokens(2, 8))
    np.testing.assert_array_equal(with_adapters, without)


@VARIANTS
def test_adapters_merged_give_the_same_numbers(make_model, make_tokens, run, changes):
    model, params = make_model(**LORA, **changes)
    params = _with_random_adapters(params)

    merged_model, merged = merge_adapters(model, params)

    assert merged_model.config == dataclasses.replace(model.config, lora_rank=0)
    got, _ = run(merged_model, merged, *make_tokens(2, 8))
    expected, _ = run(model, params, *make_tokens(2, 8))
    before, _ = run(base_model(model), split_frozen(params)[1], *make_tokens(2, 8))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)
    assert np.abs(got - before).max() > 0.1


def test_adapters_get_the_gradients_of_training_the_merged_product(make_model, make_tokens):
    model, params = make_model(**LORA)
    params = _with_random_adapters(params)
    tokens, positions = make_tokens(2, 8)

    def loss(model, params):
        logp, _ = sequence_logprobs(model, params, tokens, positions, None)
        return -logp.mean()

    adapters, frozen = split_frozen(params)
    value, grads = jax.jit(
        jax.value_and_grad(lambda adapters: loss(model, join_frozen(adapters, frozen)))
    )(adapters)
    merged_model, merged = merge_adapters(model, params)
    full_value, full = jax.jit(jax.value_and_grad(lambda merged: loss(merged_model, merged)))(
        merged
    )

    np.testing.assert_allclose(value, full_value, rtol=1e-6, atol=0)
    compared = 0
    for part in ("attention", "mlp"):
        for name, adapter in adapters["layers"]["1"][part].items():
            a, b = (np.asarray(adapter[side], np.float64) for side in "ab")
            change = np.asarray(full["layers"]["1"][part][name.removesuffix("_lora")], np.float64)
            rank, outputs = a.shape[0], b.shape[:-1]
            flat = change.reshape(int(np.prod(outputs)), -1)
            # L(W + s B A): dL/dA = s B' dL/dW, dL/dB = s dL/dW A', with s = 6 / 3.
            want_a = 2 * (b.reshape(-1, rank).T @ flat).reshape(a.shape)
            want_b = 2 * (flat @ a.reshape(rank, -1).T).reshape(b.shape)
            got = grads["layers"]["1"][part][name]
            np.testing.assert_allclose(got["a"], want_a, rtol=0, atol=1e-5)
            np.testing.assert_allclose(got["b"], want_b, rtol=0, atol=1e-5)
            assert np.abs(want_a).max() > 1e-4
            compared += 1
    assert compared == 7


def test_adapters_on_a_mesh_equal_one_device(make_model, make_tokens):
    model, params = make_model(**LORA)
    params = _with_random_adapters(params)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    tokens, positions = make_tokens(8, 8)

    placed = place(params, mesh, DEFAULT_RULES, axes_of=model.axes)
    got, _ = jax.jit(lambda p: forward(model, p, tokens, positions, mesh=mesh))(placed)

    expected, _ = forward(model, params, tokens, positions)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    _, merged = merge_adapters(model, placed)
    _, want = merge_adapters(model, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), merged, want)


def test_split_and_join_share_the_leaves(make_model):
    _, params = make_model(**LORA, lora_targets=("key",))

    adapters, frozen = split_frozen(params)

    assert set(adapters) == {"layers"}
    assert set(adapters["layers"]["0"]) == {"attention"}
    assert {leaf.shape for leaf in jax.tree.leaves(adapters)} == {(3, 32), (2, 8, 3)}
    again = join_frozen(adapters, frozen)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (again, params)), strict=True))
    assert split_frozen(frozen) == (frozen, {})


def test_init_params_with_given_ones_draws_the_rest(make_model):
    model, _ = make_model(**LORA)
    whole = init_params(model, 7)
    given = init_params(base_model(model), 7)

    params = init_params(model, 7, given=given)

    jax.tree.map(np.testing.assert_array_equal, params, whole)
    assert params["embedding"] is given["embedding"]
    np.testing.assert_array_equal(params["layers"]["0"]["mlp"]["up_lora"]["b"], np.zeros((48, 3)))


def test_save_params_merges(make_model, make_tokens, run, tmp_path):
    model, params = make_model(**LORA)
    params = _with_random_adapters(params)

    save_params(tmp_path, model, params)

    config = published_model(tmp_path)
    assert config == dataclasses.replace(
        model.config, lora_rank=0, lora_alpha=16.0, weights=str(tmp_path)
    )
    plain = build_model(config)
    got, _ = run(plain, load_params(tmp_path, plain), *make_tokens(2, 8))
    expected, _ = run(model, params, *make_tokens(2, 8))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 2, "lora_targets": ()}, r"model\.lora_targets=\(\) must be non-empty"),
        ({"lora_targets": ("query", "k")}, "must be of query, key, value, out, gate, up, down"),
        ({"lora_targets": ("up", "up")}, "each at most once"),
        (
            {"lora_rank": 2, "n_experts": 4},
            "must be without down, gate, up: experts have no adapters",
        ),
        ({"lora_rank": -1}, "model.lora_rank=-1 must be at least 0"),
    ],
)
def test_adapters_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**changes)

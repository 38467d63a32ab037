"""Products with weights [outputs, inputs]: every form computes the same numbers and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.linear import (
    inputs_first_grads,
    linear,
    many_rows,
    plain_grads,
    rows_first,
    transpose_by_block,
    weight_first,
)


def _operands(batch: int, length: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(batch * 100 + length)
    x, weight = rng.normal(size=(batch, length, 24)), rng.normal(size=(40, 24))
    return jnp.array(x, dtype), jnp.array(weight, dtype)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (4, 1), (2, 9), (8, 16), (8, 17), (2, 100)])
def test_linear_of_any_number_of_rows_equals_numpy(batch, length):
    x, weight = _operands(batch, length)

    product = jax.jit(linear)(x, weight)

    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 200])
def test_linear_casts_the_weight_to_the_activations_and_gives_the_dtype_asked_for(rows):
    x, weight = _operands(1, rows, "bfloat16")

    assert linear(x, weight.astype(jnp.float32)).dtype == jnp.bfloat16
    product = linear(x, weight, out_dtype=jnp.float32)

    assert product.dtype == jnp.float32
    expected = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    np.testing.assert_allclose(product, expected, rtol=1e-4, atol=1e-4)


def test_weight_first_of_few_rows_equals_rows_first():
    x, weight = _operands(4, 3)

    np.testing.assert_allclose(
        jax.jit(weight_first, static_argnums=2)(x, weight, jnp.dtype("float32")),
        rows_first(x, weight, jnp.dtype("float32")),
        rtol=1e-5,
        atol=1e-5,
    )


def test_weight_first_of_a_vocabulary_equals_rows_first():
    rng = np.random.default_rng(0)
    x = jnp.array(rng.normal(size=(1, 8, 4)), jnp.float32)
    weight = jnp.array(rng.normal(size=(20_000, 4)), jnp.float32)

    product = jax.jit(weight_first, static_argnums=2)(x, weight, jnp.dtype("float32"))

    assert product.size > 1 << 17
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs", [5, 1024, 1500, 4096])
def test_transpose_by_block_gives_every_number_its_place(outputs):
    x = jnp.arange(outputs * 3, dtype=jnp.float32).reshape(outputs, 3)

    turned = jax.jit(transpose_by_block)(x)

    np.testing.assert_array_equal(turned, np.asarray(x).T)


def test_gradients_of_many_rows_equal_those_that_jax_derives():
    x, weight = _operands(8, 20)
    grad = jnp.array(np.random.default_rng(0).normal(size=(8, 20, 40)), jnp.float32)

    def derived(x, weight):
        return rows_first(x, weight, x.dtype)

    _, pull_ours = jax.vjp(many_rows, x, weight)
    _, pull_derived = jax.vjp(derived, x, weight)

    forms = [pull_ours(grad), plain_grads(x, weight, grad), inputs_first_grads(x, weight, grad)]
    for ours in forms:
        for have, want in zip(ours, pull_derived(grad), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


def test_gradients_of_many_rows_keep_the_dtype_of_the_operands():
    x, weight = _operands(8, 20, "bfloat16")

    grads = jax.grad(lambda x, w: many_rows(x, w).astype(jnp.float32).sum(), argnums=(0, 1))(
        x, weight
    )

    assert [grad.dtype for grad in grads] == [jnp.bfloat16, jnp.bfloat16]

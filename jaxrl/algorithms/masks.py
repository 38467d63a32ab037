"""Masks: what is outside a mask must not change a result or a gradient, even where it is NaN."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def check_token_arrays(mask: jax.Array, **arrays: jax.Array) -> None:
    """Every array has the shape of `mask`, which is boolean. Raises AssertionError with the names.

    Works under `jit`: shapes and dtypes are known while tracing.
    """
    if jnp.result_type(mask) != jnp.bool_:
        raise AssertionError(f"mask must be bool, got {jnp.result_type(mask)}")
    names = ["mask", *arrays]
    shapes = ", ".join(
        f"{name} {jnp.shape(x)}" for name, x in zip(names, [mask, *arrays.values()], strict=True)
    )
    chex.assert_equal_shape(
        [mask, *arrays.values()], custom_message=f"per-token arrays must have one shape: {shapes}"
    )


def keep(mask: jax.Array, x: jax.Array) -> jax.Array:
    """x where mask [...], else 0: also the gradient is 0 there.

    `mask * x` would keep NaN and inf. Losses call this on their inputs *and* on their result:
    guarding only the result leaves 0 * NaN in the backward pass.
    """
    return jnp.where(mask, x, jnp.zeros_like(x))


def masked_sum(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum of x [...] over the mask -> scalar."""
    return jnp.sum(keep(mask, x))


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of x [...] over the mask -> scalar; 0 for an empty mask."""
    return masked_sum(x, mask) / jnp.maximum(jnp.sum(mask), 1)

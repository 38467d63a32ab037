"""Products of activations with weights that are stored as [outputs, inputs].

On CPU, XLA's matrix product is sensitive to which operand comes first and to what the compiler
fuses into it; the forms here are the fastest measured (`benchmarks/`). Elsewhere the obvious form
is used. All forms compute the same sums.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_FEW_ROWS = 128
_MUCH = 1 << 17  # numbers of a product: more are turned block by block
_BLOCK = 1024


def linear(
    x: jax.Array, weight: jax.Array, *, out_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """x [B, T, I], weight [O, I] -> [B, T, O] in `out_dtype`, by default that of x.

    The weight is cast to the dtype of x before the product.
    """
    weight, dtype = weight.astype(x.dtype), jnp.dtype(out_dtype or x.dtype)
    if x.shape[0] * x.shape[1] <= _FEW_ROWS:
        on_cpu = functools.partial(weight_first, dtype=dtype)
        elsewhere = functools.partial(rows_first, dtype=dtype)
        return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=elsewhere)
    return many_rows(x, weight) if dtype == x.dtype else rows_first(x, weight, dtype)


def rows_first(x: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`linear` the obvious way."""
    return jnp.einsum("bti,oi->bto", x, weight, preferred_element_type=dtype)


def weight_first(x: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`linear` for the few rows of a decode step on CPU, where it is up to twice as fast.

    XLA:CPU's matrix product wants its large operand on the left. The barrier keeps the compiler
    from swapping the operands back when it meets the transposition.
    """
    batch, length, width = x.shape
    rows = x.reshape(batch * length, width)
    product = jnp.einsum("oi,ri->or", weight, rows, preferred_element_type=dtype)
    product = jax.lax.optimization_barrier(product)
    rows = transpose_by_block(product) if product.size > _MUCH else product.T
    return rows.reshape(batch, length, -1)


def transpose_by_block(x: jax.Array) -> jax.Array:
    """x [O, R] -> [R, O], written to memory some outputs at a time.

    XLA:CPU would turn each number where it is read, in every kernel that reads it, and a whole
    vocabulary's numbers then come from far apart: for 32 rows that costs more than all the rest of
    the sampling.
    """
    outputs, rows = x.shape
    width = min(_BLOCK, outputs)

    def turn(i: jax.Array, turned: jax.Array) -> jax.Array:
        # The last block overlaps with the one before where the width does not divide.
        start = jnp.minimum(i * width, outputs - width)
        block = jax.lax.dynamic_slice_in_dim(x, start, width)
        return jax.lax.dynamic_update_slice_in_dim(turned, block.T, start, axis=1)

    return jax.lax.fori_loop(0, -(-outputs // width), turn, jnp.zeros((rows, outputs), x.dtype))


@jax.custom_vjp
def many_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`rows_first` in the dtype of x, with gradients that suit CPUs too."""
    return rows_first(x, weight, x.dtype)


def _forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not the function above: what recomputes activations must see that this is a product.
    return rows_first(x, weight, x.dtype), (x, weight)


def _backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.lax.platform_dependent(*saved, grad, cpu=inputs_first_grads, default=plain_grads)


def plain_grads(x: jax.Array, weight: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [B, T, I], weight [O, I], grad [B, T, O] -> gradients of x and of the weight."""
    return (
        jnp.einsum("bto,oi->bti", grad, weight),
        jnp.einsum("bto,bti->oi", grad, x),
    )


def inputs_first_grads(
    x: jax.Array, weight: jax.Array, grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`plain_grads` for CPU, where it takes three quarters of the time.

    The first barrier keeps the compiler from computing `grad` anew in transposed order, one number
    per cache line; the second from swapping the operands of the weight's gradient.
    """
    grad = jax.lax.optimization_barrier(grad)
    transposed = jax.lax.optimization_barrier(jnp.einsum("bti,bto->io", x, grad))
    return jnp.einsum("bto,oi->bti", grad, weight), transposed.T


many_rows.defvjp(_forward, _backward)

"""Operations and traffic of compiled programs, against the compiler's own account and by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.planning.hlo_costs import costs_of, in_unknown_loops, not_taken

F32 = jnp.float32


def compiled(function, *shapes):
    return jax.jit(function).lower(*[jax.ShapeDtypeStruct(s, F32) for s in shapes]).compile()


def test_costs_of_one_product_are_those_of_the_compiler():
    program = compiled(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (4, 8, 16), (4, 16, 32))

    costs = costs_of(program.as_text())

    assert costs.flops == 2 * 4 * 8 * 16 * 32 == program.cost_analysis()["flops"]
    assert costs.bytes >= 4 * (4 * 8 * 16 + 4 * 16 * 32 + 4 * 8 * 32)


def test_costs_of_a_scan_count_its_body_as_often_as_it_runs():
    def chain(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    program = compiled(chain, (64, 64), (7, 64, 64))

    costs = costs_of(program.as_text())

    assert costs.flops == 7 * 2 * 64**3
    # A turn reads one of the seven weights, not all of them.
    once = 64 * 64 * 4
    assert 7 * 3 * once <= costs.bytes <= 7 * 12 * once


def test_costs_of_a_loop_of_unknown_length_run_as_often_as_the_caller_says():
    def until(x, w):
        return jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)

    text = compiled(until, (32, 32), (32, 32)).as_text()

    assert costs_of(text).flops == 2 * 32**3
    assert costs_of(text, unknown_trips=5).flops == 5 * 2 * 32**3
    assert in_unknown_loops(text)


def test_in_unknown_loops_leaves_out_loops_of_known_length():
    def chain(x, ws):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    assert not in_unknown_loops(compiled(chain, (32, 32), (7, 32, 32)).as_text())


def test_costs_of_a_choice_are_those_of_its_dearer_branch():
    def choose(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x)

    assert costs_of(compiled(choose, (32, 32), (32, 32)).as_text()).flops == 2 * 2 * 32**3


def test_costs_of_products_that_are_seldom_needed_are_left_out():
    def choose(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x)

    text = compiled(choose, (32, 32), (32, 32)).as_text()

    assert costs_of(text).flops == 0
    assert not_taken(text)


def test_costs_of_a_choice_without_products_are_those_of_its_dearer_branch():
    def choose(x, w):
        return jax.lax.cond(w[0, 0] > 0, lambda x: x + w, lambda x: x, x)

    text = compiled(choose, (64, 64), (64, 64)).as_text()

    assert costs_of(text).bytes >= 3 * 4 * 64 * 64


def test_costs_of_writing_in_place_are_those_of_the_part_that_is_written():
    def write(cache, part, at):
        return jax.lax.dynamic_update_slice(cache, part, (at, 0))

    shapes = [jax.ShapeDtypeStruct(s, F32) for s in ((4096, 64), (1, 64))]
    at = jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.jit(write, donate_argnums=0).lower(*shapes, at).compile().as_text()

    assert costs_of(text).bytes < 4096 * 64


HEADS = """HloModule attention

%fused (q: bf16[32,128,8,64], k: bf16[32,256,8,64]) -> bf16[32,128,256,8] {
  %q = bf16[32,128,8,64]{3,1,2,0} parameter(0)
  %k = bf16[32,256,8,64]{3,1,2,0} parameter(1)
  ROOT %convolution = bf16[32,128,256,8]{2,1,3,0} convolution(%q, %k), WINDOW
}

ENTRY %main (q: bf16[32,128,8,64], k: bf16[32,256,8,64]) -> bf16[32,128,256,8] {
  %q = bf16[32,128,8,64]{3,1,2,0} parameter(0)
  %k = bf16[32,256,8,64]{3,1,2,0} parameter(1)
  ROOT %fusion = bf16[32,128,256,8]{2,1,3,0} fusion(%q, %k), kind=kOutput, calls=%fused
}
"""


@pytest.mark.parametrize(
    "window",
    [
        # The form in which TPU programs write a product with two batch dimensions (0 and 1).
        "window={size=32x8 stride=31x7 lhs_dilate=32x8}, dim_labels=0b1f_0o1i->0bf1",
        # The same, with the batch dimensions padded instead of spread.
        "window={size=32x8 pad=31_31x7_7 rhs_reversal=1x1 stride=31x7 lhs_dilate=32x8}, "
        "dim_labels=0b1f_0o1i->0bf1",
    ],
)
def test_costs_of_a_product_written_as_convolution_count_no_padding(window):
    if "pad" in window:
        # Spread positions lie at multiples of 32 (8): only the padding's shift decides.
        window = window.replace("pad=31_31x7_7", "pad=0_0x0_0")

    costs = costs_of(HEADS.replace("WINDOW", window))

    assert costs.flops == 2 * 32 * 8 * 128 * 256 * 64
    assert costs.bytes == 2 * (32 * 128 * 8 * 64 + 32 * 256 * 8 * 64 + 32 * 128 * 256 * 8)


def test_costs_of_a_real_convolution_are_those_of_the_compiler():
    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, (2, 1), ((1, 2), (0, 1)), rhs_dilation=(1, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    program = compiled(convolve, (2, 12, 10, 3), (3, 2, 3, 5))

    np.testing.assert_allclose(
        costs_of(program.as_text()).flops, program.cost_analysis()["flops"], rtol=0, atol=0
    )


def test_costs_of_a_kernel_are_the_operations_that_it_names():
    text = """HloModule m

ENTRY %main (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %k = f32[8]{0} custom-call(%q), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":{"flops":"1234"}}}
}
"""  # noqa: E501

    assert costs_of(text).flops == 1234


@pytest.mark.parametrize("rows", [1, 2])
def test_costs_of_the_attention_kernel_are_those_of_the_pairs_that_it_does_not_skip(rows):
    text = """HloModule m

ENTRY %main (q: bf16[2,8,512,64], k: bf16[2,4,512,64]) -> bf16[2,8,512,64] {
  %q = bf16[2,8,512,64]{3,2,1,0} parameter(0)
  %k = bf16[2,4,512,64]{3,2,1,0} parameter(1)
  ROOT %splash_mha_fwd_residuals.1 = bf16[2,8,512,64]{3,2,1,0} custom-call(%q, %k), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501

    # Two products of 2 T S H operations for each head, of which half are hidden by the mask.
    text = text if rows == 2 else text.replace("[2,", "[").replace("{3,2,1,0}", "{2,1,0}")
    assert costs_of(text).flops == rows * 2 * 2 * 8 * 512 * 512 * 64 / 2


NESTED = """HloModule nested

%slice (whole: f32[36,64,32], at: s32[]) -> f32[64,32] {
  %whole = f32[36,64,32]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[1,64,32] dynamic-slice(%whole, %at, %zero, %zero), dynamic_slice_sizes={1,64,32}
  ROOT %flat = f32[64,32]{1,0} bitcast(%part)
}

%product (x: f32[8,64], weights: f32[36,64,32], layer: s32[]) -> f32[8,32] {
  %x = f32[8,64]{1,0} parameter(0)
  %weights = f32[36,64,32]{2,1,0} parameter(1)
  %layer = s32[] parameter(2)
  %own = f32[64,32]{1,0} fusion(%weights, %layer), kind=kLoop, calls=%slice
  ROOT %y = f32[8,32]{1,0} dot(%x, %own), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,64], weights: f32[36,64,32], layer: s32[]) -> f32[8,32] {
  %x = f32[8,64]{1,0} parameter(0)
  %weights = f32[36,64,32]{2,1,0} parameter(1)
  %layer = s32[] parameter(2)
  ROOT %y = f32[8,32]{1,0} fusion(%x, %weights, %layer), kind=kOutput, calls=%product
}
"""


def test_costs_of_a_fusion_that_slices_within_read_the_slice_alone():
    costs = costs_of(NESTED)

    assert costs.flops == 2 * 8 * 64 * 32
    # Activations, one of 36 layers' weights, its number, the result.
    assert costs.bytes == 4 * (8 * 64 + 64 * 32 + 1 + 8 * 32)

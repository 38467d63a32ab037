"""The ring and the TPU kernel give the numbers and gradients of plain attention."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.attention import attend, causal_mask
from jaxrl.models.ring import ring_attend
from jaxrl.models.sight import choose_attention
from jaxrl.models.splash import splash_attend, splash_fits
from jaxrl.models.spread import spread_over
from jaxrl.sharding import DEFAULT_RULES, make_mesh

B, N, K, H = 2, 4, 2, 8


def make_inputs(length, width=H):
    rng = np.random.default_rng(0)
    shapes = ((B, length, N, width), (B, length, K, width), (B, length, K, width))
    arrays = [jnp.array(rng.normal(size=shape), jnp.float32) for shape in shapes]
    # A row of two sequences and padding, and a row of one sequence.
    segments = np.ones((B, length), np.int32)
    segments[0, length // 3 :], segments[0, -length // 8 :] = 2, 0
    return arrays, jnp.array(segments)


def plain(query, key, value, segments, *, window=0, scale=None, cap=0.0):
    mask = causal_mask(query.shape[1], segments, window)
    return attend(query, key.swapaxes(1, 2), value.swapaxes(1, 2), mask, scale=scale, cap=cap)


def with_gradients(function, segments):
    """(query, key, value, target) -> the output, and the gradients of its product with target."""

    def run(query, key, value, target):
        out, back = jax.vjp(lambda *args: function(*args, segments), query, key, value)
        return out, back(target)

    return jax.jit(run)


def compare(got, expected, atol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"window": 5, "cap": 2.0},
        pytest.param({"window": 13, "scale": 0.5}, marks=pytest.mark.slow),
        pytest.param({"window": 8}, marks=pytest.mark.slow),
        pytest.param({"window": 9}, marks=pytest.mark.slow),
        pytest.param({"window": 1}, marks=pytest.mark.slow),
        pytest.param({"window": 99, "cap": 1.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ring_equals_plain_attention(how):
    arrays, segments = make_inputs(32)
    spread = spread_over(make_mesh(context=4, tensor=2), DEFAULT_RULES, B, 32)
    ring = functools.partial(ring_attend, spread=spread, widest=how.get("window", 0), **how)
    target = jax.random.normal(jax.random.key(0), arrays[0].shape)

    got = with_gradients(ring, segments)(*arrays, target)

    expected = with_gradients(functools.partial(plain, **how), segments)(*arrays, target)
    compare(got, expected, 1e-5)


def test_ring_with_a_window_known_only_on_the_device_equals_plain_attention():
    arrays, segments = make_inputs(32)
    spread = spread_over(make_mesh(context=4, fsdp=2), DEFAULT_RULES, B, 32)
    ring = jax.jit(lambda window: ring_attend(*arrays, segments, spread, window=window))

    for window in (0, 3):
        expected = plain(*arrays, segments, window=window)
        np.testing.assert_allclose(ring(window), expected, rtol=0, atol=1e-5)


def test_ring_holds_no_whole_length_and_passes_on_only_what_a_window_shows():
    arrays, segments = make_inputs(64)
    mesh = make_mesh(context=8)
    spread = spread_over(mesh, DEFAULT_RULES, B, 64)
    split = DEFAULT_RULES.sharding(mesh, (None, "length"))
    arrays, segments = jax.device_put((arrays, segments), split)

    def text(window):
        ring = functools.partial(ring_attend, spread=spread, window=window, widest=window)
        gradients = jax.grad(lambda *args: ring(*args).sum(), argnums=(0, 1, 2))
        compiled = jax.jit(gradients, out_shardings=split).lower(*arrays, segments).compile()
        return compiled.as_text()

    whole, near = text(0), text(9)

    for program in (whole, near):
        shapes = re.findall(r"= \(?\w+\[([\d,]+)\]", program)
        assert not [shape for shape in shapes if "64" in shape.split(",")[1:]]
        assert not re.search(r"all-(gather|reduce|to-all)\(", program)
    trips = [re.findall(r'known_trip_count":\{"n":"(\d+)"', program) for program in (whole, near)]
    assert set(trips[0]) == {"7"}
    assert set(trips[1]) <= {"1"}  # a loop of one step may be none


@pytest.mark.parametrize(
    ("how", "axes", "width"),
    [
        pytest.param({}, {"data": 2, "tensor": 2}, 8, marks=pytest.mark.slow),
        ({"window": 70, "cap": 3.0}, {"context": 2}, 8),
        pytest.param({"window": 70}, {"tensor": 2}, 64, marks=pytest.mark.slow),
        pytest.param({"cap": 3.0, "scale": 0.2}, {"context": 2}, 128, marks=pytest.mark.slow),
        pytest.param({}, {"tensor": 2}, 136, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_splash_interpreted_equals_plain_attention(how, axes, width):
    length = 256
    arrays, segments = make_inputs(length, width)
    devices = jax.devices()[: 2 ** len(axes)]
    spread = spread_over(make_mesh(**axes, devices=devices), DEFAULT_RULES, B, length)
    splash = functools.partial(splash_attend, spread=spread, interpret=True, **how)
    target = jax.random.normal(jax.random.key(0), arrays[0].shape)

    got = with_gradients(splash, segments)(*arrays, target)

    expected = with_gradients(functools.partial(plain, **how), segments)(*arrays, target)
    compare(got, expected, 2e-5)


@pytest.mark.slow
def test_splash_interpreted_of_a_length_that_blocks_do_not_divide_equals_plain_attention():
    arrays, segments = make_inputs(72)
    spread = spread_over(make_mesh(data=2, devices=jax.devices()[:2]), DEFAULT_RULES, B, 72)

    got = splash_attend(*arrays, segments, spread, interpret=True)

    np.testing.assert_allclose(got, plain(*arrays, segments), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("length", "parts", "fits"), [(512, 4, True), (300, 1, True), (320, 4, False), (64, 2, False)]
)
def test_splash_fits_lengths_whose_parts_are_whole_blocks(length, parts, fits):
    assert splash_fits(length, parts) is fits


def test_choose_attention_on_cpu_is_a_ring_only_where_the_length_is_split():
    ring = spread_over(make_mesh(context=2, data=4), DEFAULT_RULES, 4, 16)
    plain = spread_over(make_mesh(data=8), DEFAULT_RULES, 8, 16)
    odd = spread_over(make_mesh(context=8), DEFAULT_RULES, 8, 17)

    chosen = [choose_attention(spread, 16) for spread in (ring, plain, odd, None)]

    assert chosen == ["ring", "plain", "plain", "plain"]

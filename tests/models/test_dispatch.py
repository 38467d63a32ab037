"""Experts on eight CPU devices: any routing gives the numbers of one device, with little waste."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.dispatch import AXES, Weights, bucket_sizes, experts_on_mesh
from jaxrl.models.spread import spread_over
from jaxrl.sharding import DEFAULT_RULES, make_mesh, place

E, K, D, F = 8, 2, 16, 8
SHAPES = Weights(router=(E, D), gate=(E, F, D), up=(E, F, D), down=(E, D, F))
# What is added to the scores of the experts.
ROUTINGS = {
    "even": [0] * E,
    "all to two experts of one device": [99, 98] + [0] * 6,
    "some experts get nothing": [0, -99, 0, -99, -99, 0, 0, -99],
}


def route(rows, router):
    shares, chosen = jax.lax.top_k(jax.nn.softmax(rows @ router.T), K)
    return shares, chosen


def on_one_device(x, weights):
    """Every expert on every token, one after the other."""
    shares, chosen = route(x, weights.router)
    total = jnp.zeros_like(x)
    for e in range(E):
        inner = jax.nn.silu(x @ weights.gate[e].T) * (x @ weights.up[e].T)
        share = jnp.sum(jnp.where(chosen == e, shares, 0), axis=-1)
        total += share[..., None] * (inner @ weights.down[e].T)
    return total


def make_inputs(rows, length, routing):
    rng = np.random.default_rng(0)
    # Eighths in tokens and router: scores are then exact, in whatever order they are summed.
    x = (rng.normal(size=(rows, length, D)) * 8).round().astype(np.float32) / 8
    x[..., 0] = 1  # so that the router's first column is added to the scores
    weights = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]
    weights[0] = (weights[0] * 8).round() / 8
    weights[0][:, 0] = routing
    return jnp.array(x), Weights(*map(jnp.array, weights))


def spread_of(mesh, rows, length):
    return spread_over(mesh, DEFAULT_RULES, rows, length)


@functools.cache
def programs(axes, rows, length):
    """(mesh, output and gradients on it, those on one device), compiled once for all routings."""
    mesh = make_mesh(**dict(axes))

    def on_mesh(x, weights):
        spread = spread_of(mesh, rows, length)
        return experts_on_mesh(x, weights, spread, route=route, k=K, activation=jax.nn.silu)

    def with_gradients(function):
        def run(x, weights, target):
            out, back = jax.vjp(function, x, weights)
            return out, back(target)

        return jax.jit(run)

    return mesh, with_gradients(on_mesh), with_gradients(on_one_device)


MESHES = [
    {"data": 2, "expert": 4},
    {"expert": 2, "expert_tensor": 2, "context": 2},
    pytest.param({"fsdp": 2, "tensor": 2, "expert": 2}, marks=pytest.mark.slow),
    pytest.param({"expert": 8}, marks=pytest.mark.slow),
    pytest.param({"expert_tensor": 8}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=list(ROUTINGS))
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_experts_on_mesh_of_any_routing_equal_one_device(axes, routing):
    rows, length = 8, 32
    mesh, on_mesh, expected_of = programs(tuple(axes.items()), rows, length)
    x, weights = make_inputs(rows, length, routing)
    target = jax.random.normal(jax.random.key(1), x.shape)

    placed = place(weights, mesh, DEFAULT_RULES, axes_of=AXES)
    x_split = jax.device_put(x, DEFAULT_RULES.sharding(mesh, ("batch", "length", None)))
    got, grads = on_mesh(x_split, placed, target)

    expected, expected_grads = expected_of(x, weights, target)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(("rows", "length"), [(1, 3), (1, 24)])
def test_experts_on_mesh_with_few_tokens_equal_one_device(rows, length):
    mesh = make_mesh(data=2, expert=2, expert_tensor=2)
    x, weights = make_inputs(rows, length, ROUTINGS["even"])
    placed = place(weights, mesh, DEFAULT_RULES, axes_of=AXES)

    run = functools.partial(experts_on_mesh, route=route, k=K, activation=jax.nn.silu)
    got = jax.jit(run, static_argnums=2)(x, placed, spread_of(mesh, rows, length))

    expected = jax.jit(on_one_device)(x, weights)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("tokens", "room", "rounds"),
    [(4096, 768, 6), (100, 19, 6), (16, 8, 2), (8, 8, 1), (1, 1, 1)],
)
def test_bucket_sizes_take_any_routing(tokens, room, rounds):
    sizes = bucket_sizes(tokens, experts=16, k=2)

    assert (sizes.room, sizes.rounds) == (room, rounds)
    assert sizes.room * sizes.rounds >= tokens  # all of them may choose the same expert


def test_experts_on_mesh_compute_little_more_than_what_was_chosen_and_send_it_once():
    mesh = make_mesh(data=2, expert=4)
    x, weights = make_inputs(8, 64, ROUTINGS["even"])
    placed = place(weights, mesh, DEFAULT_RULES, axes_of=AXES)
    run = functools.partial(experts_on_mesh, route=route, k=K, activation=jax.nn.silu)

    x = jax.device_put(x, DEFAULT_RULES.sharding(mesh, ("batch", "length", None)))
    compiled = jax.jit(run, static_argnums=2).lower(x, placed, spread_of(mesh, 8, 64)).compile()

    # The compiler counts the usual round, and one of the further ones, which is not entered.
    tokens, slack = 8 * 64 // 8, 1.5
    chosen = 2 * 3 * tokens * K * D * F
    everything = chosen * E // K
    flops = compiled.cost_analysis()["flops"]
    assert 2 * slack * chosen < flops < everything
    text = compiled.as_text()
    assert len(re.findall(r"= \(?f32.* all-to-all\(", text)) == 4  # there and back, twice
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    assert gathered == [f"{D},{E}"]  # the router; neither tokens nor experts

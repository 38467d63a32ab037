"""On eight CPU devices, every way to split the model gives the numbers of one device."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.model import build_model, forward, init_cache, init_params, sequence_logprobs
from jaxrl.sharding import DEFAULT_RULES, bytes_per_device, make_mesh, place

SIZES = {"n_layers": 1, "qk_norm": True}


def _split(mesh, *arrays):
    sharding = DEFAULT_RULES.sharding(mesh, ("batch", "length"))
    return [jax.device_put(x, sharding) for x in arrays]


def _loss(model, mesh, params, tokens, positions):
    segment_ids = 1 + (jnp.arange(tokens.shape[1]) >= 10)[None] + jnp.zeros_like(tokens)
    logp, _ = sequence_logprobs(model, params, tokens, positions, segment_ids, chunk=32, mesh=mesh)
    return logp.mean(), logp


@pytest.fixture(scope="module")
def expected(make_model, make_tokens):
    """(loss, logp), gradients on one device."""
    model, params = make_model(**SIZES)
    loss = functools.partial(_loss, model, None)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *make_tokens(8, 16))


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"fsdp": 2, "context": 2, "tensor": 2},
        pytest.param({"fsdp": 8}, marks=pytest.mark.slow),
        pytest.param({"data": 4, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sharded_logprobs_and_gradients_equal_one_device(make_model, make_tokens, expected, axes):
    mesh = make_mesh(**axes)
    model, params = make_model(**SIZES)
    placed = place(params, mesh, DEFAULT_RULES, axes_of=model.axes)
    loss = functools.partial(_loss, model, mesh)

    (value, logp), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        placed, *_split(mesh, *make_tokens(8, 16))
    )

    (expected_value, expected_logp), expected_gradients = expected
    np.testing.assert_allclose(value, expected_value, rtol=0, atol=1e-5)
    np.testing.assert_allclose(logp, expected_logp, rtol=0, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5),
        gradients, expected_gradients,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"scan_layers": True}),
        ({"context": 2, "expert": 2, "tensor": 2}, {"n_experts": 4}),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"context": 2, "expert_tensor": 4}, {"n_experts": 4}, marks=pytest.mark.slow),
        pytest.param({"context": 8}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sharded_prefill_and_decode_equal_one_device(make_model, make_tokens, axes, changes):
    mesh = make_mesh(**axes)
    model, params = make_model(n_layers=2, qk_norm=True, **changes)
    placed = place(params, mesh, DEFAULT_RULES, axes_of=model.axes)
    tokens, positions = make_tokens(8, 8)
    expected, _ = forward(model, params, tokens, positions)

    cache = init_cache(model, 8, 12, mesh=mesh)
    split = jax.tree.map(lambda side: side.sharding, cache)
    step = jax.jit(functools.partial(forward, model, mesh=mesh), out_shardings=(None, split))
    hidden, cache = step(placed, tokens[:, :7], positions[:, :7], None, cache)
    last, cache = step(placed, tokens[:, 7:], positions[:, 7:], None, cache)

    np.testing.assert_allclose(hidden, expected[:, :7], rtol=0, atol=1e-5)
    np.testing.assert_allclose(last, expected[:, 7:], rtol=0, atol=1e-5)
    # Slots and heads are divided over all eight devices, whatever the axes.
    keys = jax.tree.leaves(cache)[0]
    assert keys.addressable_shards[0].data.size * 8 == keys.size


def test_sharded_batch_that_data_axes_do_not_divide_still_gives_the_numbers(
    make_model, make_tokens
):
    mesh = make_mesh(data=4, tensor=2)
    model, params = make_model(**SIZES)
    placed = place(params, mesh, DEFAULT_RULES, axes_of=model.axes)
    tokens, positions = make_tokens(1, 8)

    hidden, _ = jax.jit(functools.partial(forward, model, mesh=mesh))(placed, tokens, positions)

    expected, _ = forward(model, params, tokens, positions)
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=1e-5)


def test_init_params_numbers_do_not_depend_on_the_mesh(make_model):
    model, _ = make_model(**SIZES)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)

    sharded, single = init_params(model, 5, mesh=mesh), init_params(model, 5)

    jax.tree.map(np.testing.assert_array_equal, sharded, single)
    assert jax.tree.map(lambda x: x.sharding, sharded) == model.shardings(mesh)
    assert bytes_per_device(sharded) < 0.3 * bytes_per_device(single)


def test_init_cache_is_split_over_rows_and_kv_heads(make_model):
    model, _ = make_model(**SIZES)

    cache = init_cache(model, 8, 12, mesh=make_mesh(data=2, fsdp=2, tensor=2))

    assert cache.keys[0].addressable_shards[0].data.shape == (2, 1, 12, 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, r"attention/key.*dimension 0 \('kv_heads'\) of size 2 .*tensor=8"),
        ({"n_heads": 8, "n_kv_heads": 8, "mlp_dim": 44}, r"mlp/down.*size 44 .*tensor=8"),
        ({"n_heads": 8, "n_kv_heads": 8, "vocab_size": 60}, r"embedding.*\('vocab'\) of size 60"),
    ],
)
def test_model_that_the_mesh_cannot_split_error_gives_path_and_numbers(make_model, changes, words):
    config = make_model()[0].config
    model = build_model(type(config)(**{**vars(config), **changes}))

    with pytest.raises(ValueError, match=words):
        init_params(model, 0, mesh=make_mesh(tensor=8))


_COLLECTIVE = re.compile(
    r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"\w+\[([\d,]+)\]")


def _collective_shapes(compiled_text: str) -> set[tuple[int, ...]]:
    """Shapes of all results of collectives in an HLO text."""
    results = _COLLECTIVE.findall(compiled_text)
    return {
        tuple(map(int, dims.split(","))) for result in results for dims in _ARRAY.findall(result)
    }


@pytest.mark.parametrize("pinned", [True, False])
def test_fully_sharded_step_moves_weights_and_never_activations(make_model, make_tokens, pinned):
    mesh = make_mesh(fsdp=8)
    model, params = make_model(**SIZES)
    placed = place(params, mesh, DEFAULT_RULES, axes_of=model.axes)
    loss = functools.partial(_loss, model, mesh if pinned else None)
    gradient = jax.jit(jax.grad(loss, has_aux=True), out_shardings=(model.shardings(mesh), None))

    text = gradient.lower(placed, *_split(mesh, *make_tokens(8, 16))).compile().as_text()

    of_weights = {shape for shape in _collective_shapes(text) if not _is_activation(shape)}
    activations = _collective_shapes(text) - of_weights
    assert of_weights
    assert bool(activations) is not pinned  # without the pins, the compiler moves whole batches


def _is_activation(shape: tuple[int, ...]) -> bool:
    """Batch 8 and length 16 come first, in whole; no weight of this model has such a shape."""
    return len(shape) > 2 and shape[:2] == (8, 16)


def test_tensor_split_step_norms_see_their_part_of_the_length_and_no_sum_is_all_reduced(
    make_model, make_tokens
):
    mesh = make_mesh(data=2, context=2, tensor=2)
    model, params = make_model(n_layers=1)
    placed = place(params, mesh, DEFAULT_RULES, axes_of=model.axes)
    loss = functools.partial(_loss, model, mesh)
    gradient = jax.jit(jax.grad(loss, has_aux=True), out_shardings=(model.shardings(mesh), None))

    text = gradient.lower(placed, *_split(mesh, *make_tokens(8, 16))).compile().as_text()

    # Before attention, before the MLP, before the logits: 4 rows of 16 / (context x tensor) tokens.
    assert re.findall(r"= f32\[([\d,]+)\]\S* rsqrt\(", text) == ["4,4,1"] * 3
    stream = rf"f32\[4,(?:4|8),{model.config.d_model}\]"
    assert re.search(rf"= {stream}\S* reduce-scatter\(", text)
    assert not re.search(rf"= {stream}\S* all-reduce\(", text)

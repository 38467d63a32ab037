"""Options that save memory: what they keep, where it lies, and that the numbers stay right."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train.train_cases import LR, make_batch, make_engine, tiny_params

from jaxrl.config import ModelConfig, SFTConfig, TrainConfig
from jaxrl.errors import ConfigError
from jaxrl.models.model import build_model, init_params, sequence_logprobs
from jaxrl.sharding import bytes_per_device, make_mesh
from jaxrl.train.checkpoint import CheckpointStore
from jaxrl.train.optimizer import adafactor, adamw, make_optimizer, make_schedule
from jaxrl.train.reference import Reference


def flat_rate(rate: float = LR):
    return make_schedule("constant", learning_rate=rate)


def apply(optimizer, params, grads):
    state = optimizer.init(params)
    for g in grads:
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_adamw_keeps_moments_in_the_dtype_asked_for_whatever_that_of_the_weights(kept):
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}

    _, state = apply(adamw(flat_rate(), moment_dtype=kept), params, [params])

    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 2]
    assert [leaf.dtype for leaf in moments] == [kept, kept]


def test_adamw_with_bfloat16_moments_follows_float32_within_a_hundredth_of_the_way():
    rng = np.random.default_rng(0)
    start = {"w": jnp.float32(rng.normal(size=(32, 32)))}
    grads = [{"w": jnp.float32(rng.normal(0.3, 1.0, (32, 32)))} for _ in range(50)]

    exact, _ = apply(adamw(flat_rate(), grad_clip=0), start, grads)
    rounded, _ = apply(adamw(flat_rate(), grad_clip=0, moment_dtype="bfloat16"), start, grads)

    way = np.linalg.norm(exact["w"] - start["w"])
    assert 0 < np.linalg.norm(exact["w"] - rounded["w"]) < 0.01 * way


def test_adamw_with_bfloat16_moments_second_moment_falls_at_the_largest_b2_allowed():
    params = {"w": jnp.zeros(8)}
    grads = [{"w": jnp.full(8, 3.0)}] + [{"w": jnp.zeros(8)}] * 400

    _, state = apply(adamw(flat_rate(), b2=0.99, moment_dtype="bfloat16"), params, grads)

    second = optax.tree_utils.tree_get(state, "nu")["w"]
    assert float(second.max()) < 0.05 * 0.01 * 9


def test_adafactor_two_updates_equal_the_paper_worked_by_hand():
    rng = np.random.default_rng(1)
    w, grads = rng.normal(size=(6, 4)), [rng.normal(size=(6, 4)) for _ in range(2)]
    expected, row, column = w, np.zeros(6), np.zeros(4)
    for t, g in enumerate(grads, start=1):
        decay = 1 - t**-0.8
        row = decay * row + (1 - decay) * (g**2 + 1e-30).mean(1)
        column = decay * column + (1 - decay) * (g**2 + 1e-30).mean(0)
        update = g / np.sqrt(np.outer(row, column) / row.mean())
        update /= max(1.0, np.sqrt((update**2).mean()))
        expected = expected - 0.1 * update

    optimizer = adafactor(flat_rate(0.1), grad_clip=0, smallest=4)
    got, _ = apply(optimizer, {"w": jnp.float32(w)}, [{"w": jnp.float32(g)} for g in grads])

    np.testing.assert_allclose(got["w"], expected, rtol=1e-5, atol=1e-6)


def test_adafactor_keeps_less_than_a_tenth_of_what_adamw_does():
    params = jax.eval_shape(lambda: {"w": jnp.zeros((4, 256, 512)), "scale": jnp.zeros(256)})

    kept = {make: bytes_per_device(jax.eval_shape(make(flat_rate()).init, params))
            for make in (adamw, adafactor)}  # fmt: skip

    assert kept[adafactor] < 0.1 * kept[adamw]


@pytest.mark.parametrize("config", [SFTConfig, TrainConfig])
def test_make_optimizer_takes_kind_and_moments_from_the_config(config):
    params = {"w": jnp.ones((128, 128))}

    half = make_optimizer(config(moment_dtype="bfloat16")).init(params)
    factored = make_optimizer(config(optimizer="adafactor")).init(params)

    assert [x.dtype for x in jax.tree.leaves(half) if x.ndim == 2] == ["bfloat16"] * 2
    assert not [x for x in jax.tree.leaves(factored) if x.ndim == 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moment_dtype": "bfloat16", "b2": 0.999}, "train.b2=0.999 must be at most 0.99"),
        ({"moment_dtype": "bfloat16", "optimizer": "adafactor"}, "train.moment_dtype='bfloat16'"),
        ({"optimizer": "sgd"}, "train.optimizer='sgd'"),
    ],
)
def test_train_config_impossible_optimizer_is_refused_with_the_values(values, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**values)


@pytest.mark.parametrize(
    "optimizer",
    [
        adamw(flat_rate(), grad_clip=0, moment_dtype="bfloat16"),
        adafactor(flat_rate(), grad_clip=0, smallest=4),
    ],
    ids=["bfloat16", "adafactor"],
)
def test_engine_splits_small_moments_as_weights_and_a_checkpoint_brings_them_back(
    optimizer, tmp_path
):
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    alone, split = make_engine(optimizer=optimizer), make_engine(optimizer=optimizer, mesh=mesh)
    for engine in (alone, split):
        engine.update(make_batch())
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, split.state, {})
    store.wait()
    restored, _ = store.restore(split.abstract_state, 1)

    weights = jax.tree.leaves(split.params)
    moments = [x for x in jax.tree.leaves(split.state.opt_state) if x.ndim == 2 and x.size > 64]
    for one in moments:
        twin = next(w for w in weights if w.shape == one.shape)
        assert one.sharding.is_equivalent_to(twin.sharding, one.ndim)
    rows = [x for x in jax.tree.leaves(split.state.opt_state) if x.ndim == 1 and x.size >= 16]
    assert moments or any(not x.sharding.is_fully_replicated for x in rows)
    for a, b in zip(jax.tree.leaves(alone.params), weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(split.state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.dtype == b.dtype


@pytest.mark.parametrize("scan", [False, True])
def test_remat_keeping_products_gives_the_gradients_of_keeping_all(scan):
    config = ModelConfig(
        n_layers=2, d_model=16, n_heads=2, n_kv_heads=1, head_dim=8, mlp_dim=32, vocab_size=11,
        max_length=8, scan_layers=scan,
    )  # fmt: skip
    tokens = jnp.arange(16).reshape(2, 8) % 11
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))

    def gradients(remat: str):
        model = build_model(dataclasses.replace(config, remat=remat))

        def loss(params):
            return sequence_logprobs(model, params, tokens, positions, None)[0].sum()

        return jax.jit(jax.grad(loss))(init_params(model, 0))

    for a, b in zip(*map(jax.tree.leaves, map(gradients, ("none", "dots"))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_remat_with_scanned_layers_each_choice_needs_less_memory_than_the_one_before():
    sizes = []
    for remat in ("none", "dots", "full"):
        model = build_model(ModelConfig(
            n_layers=4, d_model=64, n_heads=2, n_kv_heads=1, head_dim=32, mlp_dim=256,
            vocab_size=64, max_length=128, scan_layers=True, remat=remat,
        ))  # fmt: skip
        ints = jax.ShapeDtypeStruct((4, 128), jnp.int32)

        def loss(params, tokens, positions, model=model):
            return sequence_logprobs(model, params, tokens, positions, None)[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(model.abstract, ints, ints).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)

    assert sizes[0] > 1.5 * sizes[1]
    assert sizes[1] > 1.5 * sizes[2]


@pytest.mark.parametrize("split", [False, True])
def test_reference_offloaded_lies_on_the_host_and_its_logprobs_are_the_same_bits(split):
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4]) if split else None
    engine, batch = make_engine(mesh=mesh), make_batch()
    before = np.asarray(engine.logprobs(batch))
    kept = Reference(engine.params)
    offloaded = Reference(engine.params, offload=True)

    engine.update(batch)  # donates the weights that both were made of

    for reference in (kept, offloaded):
        got = np.asarray(engine.logprobs(batch, reference.params()))
        np.testing.assert_array_equal(got, before)
    assert np.abs(np.asarray(engine.logprobs(batch)) - before).max() > 1e-4
    assert {x.sharding.memory_kind for x in jax.tree.leaves(offloaded.held)} == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(kept.held)} == {"device"}


def test_reference_without_host_memory_of_the_backend_is_kept_as_numpy(monkeypatch):
    monkeypatch.setattr("jaxrl.train.reference._HOST", "a memory that no backend has")
    engine = make_engine()

    reference = Reference(engine.params, offload=True)

    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(reference.held))
    for a, b in zip(*map(jax.tree.leaves, (reference.params(), tiny_params())), strict=True):
        np.testing.assert_array_equal(a, b)

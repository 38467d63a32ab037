"""The train engine: exact numbers on any mesh, no waiting, no recompiling, safe hand-over."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from host_sync import no_host_sync
from train.train_cases import (
    EPS,
    LENGTH,
    LR,
    ROWS,
    make_batch,
    make_engine,
    reused_engine,
    tiny_model,
    tiny_params,
)

from jaxrl.config import AlgorithmConfig
from jaxrl.errors import CheckpointError
from jaxrl.models.model import forward, unembed
from jaxrl.sharding import make_mesh
from jaxrl.train.objectives import grpo_objective, sft_objective
from jaxrl.weights.digest import compute_digest, verify
from jaxrl.weights.exchange import publish


def assert_trees_close(got, expected, *, rtol, atol):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=str(path))


def numbers(metrics):
    return {name: float(value) for name, value in metrics.items()}


def reference_logp(params, batch, temperature=1.0):
    """Log-probabilities the plain way: all logits at once."""
    model = tiny_model()
    hidden, _ = forward(model, params, batch.tokens, batch.positions, batch.segment_ids)
    logits = unembed(model, params, hidden) / temperature
    logp = jax.nn.log_softmax(logits)[:, :-1]
    picked = jnp.take_along_axis(logp, jnp.asarray(batch.tokens)[:, 1:, None], -1)[..., 0]
    return jnp.pad(picked, ((0, 0), (1, 0)))


def test_update_equals_plain_gradient_and_adamw_by_hand():
    batch = make_batch()
    engine = reused_engine()

    metrics = numbers(engine.update(batch))

    def loss(params):
        logp = reference_logp(params, batch)
        weight = jnp.minimum(jnp.exp(jax.lax.stop_gradient(logp) - batch.behavior_logp), 5.0)
        terms = -weight * batch.advantages * jnp.exp(logp - jax.lax.stop_gradient(logp))
        return jnp.sum(jnp.where(batch.loss_mask, terms, 0) * batch.loss_weights)

    value, grads = jax.jit(jax.value_and_grad(loss))(tiny_params())
    # The first update of Adam: both bias-corrected moments are those of the gradient itself.
    expected = jax.tree.map(lambda w, g: w - LR * g / (jnp.abs(g) + EPS), tiny_params(), grads)
    assert_trees_close(engine.params, expected, rtol=1e-5, atol=1e-6)
    logp = np.asarray(reference_logp(tiny_params(), batch))
    gap = np.abs(logp - batch.behavior_logp)[batch.loss_mask]
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
    assert metrics["logp_gap"] == pytest.approx(gap.mean(), rel=1e-5)
    assert metrics["logp_gap_max"] == pytest.approx(gap.max(), rel=1e-5)
    assert metrics["tokens"] == batch.loss_mask.sum()
    assert metrics["learning_rate"] == pytest.approx(LR)
    assert metrics["nonfinite"] == 0


@pytest.mark.parametrize("unbalanced", [False, True])
def test_update_micro_batches_change_nothing(unbalanced):
    batch = make_batch(1, unbalanced=unbalanced)
    whole = reused_engine()
    expected = numbers(whole.update(batch))

    for micro_batches in (2, 4):
        engine = reused_engine(micro_batches)
        metrics = numbers(engine.update(batch))

        assert_trees_close(engine.state.opt_state, whole.state.opt_state, rtol=1e-5, atol=1e-6)
        assert_trees_close(engine.params, whole.params, rtol=0, atol=1e-6)
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)


MESHES = {"data8": {"data": 8}, "fsdp4 tensor2": {"fsdp": 4, "tensor": 2, "micro_batches": 2}}


@pytest.mark.parametrize("axes", MESHES.values(), ids=list(MESHES))
def test_update_sharded_equals_single_device(axes):
    single, sharded = reused_engine(), reused_engine(**axes)

    for seed in range(2):
        expected = numbers(single.update(make_batch(seed)))
        metrics = numbers(sharded.update(make_batch(seed)))

        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert_trees_close(sharded.params, single.params, rtol=1e-5, atol=1e-5)
    kernel = sharded.params["layers"]["0"]["mlp"]["gate"]
    moment = optax.tree.get(sharded.state.opt_state, "mu")["layers"]["0"]["mlp"]["gate"]
    assert kernel.sharding == moment.sharding
    parts = axes.get("fsdp", 1) * axes.get("tensor", 1)
    assert kernel.addressable_shards[0].data.size * parts == kernel.size


@pytest.fixture
def engine():
    return reused_engine(**MESHES["fsdp4 tensor2"])


def test_update_compiles_once_and_never_waits_for_the_device(engine):
    engine.update(make_batch(0))
    with no_host_sync():
        for seed in range(3):
            metrics = engine.update(make_batch(seed))

    assert engine.compile_count == 1
    assert all(isinstance(value, jax.Array) and value.shape == () for value in metrics.values())


def test_update_counts_versions_on_the_host(engine):
    engine.restore(engine.state, version=5)

    engine.update(make_batch())
    engine.update(make_batch())

    assert engine.version == 7
    assert int(engine.state.step) == 2


def test_step_has_no_callback_into_the_host(engine):
    arrays = engine._place(make_batch().arrays())

    jaxpr = str(engine._update.trace(engine.state, engine.frozen, arrays).jaxpr)

    assert "scan" in jaxpr
    assert "callback" not in jaxpr
    assert "infeed" not in jaxpr
    assert "outfeed" not in jaxpr


def test_published_weights_survive_the_next_update(engine):
    held = engine.params
    copy, version = publish(engine.params, engine.version)

    engine.update(make_batch())

    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(held))
    verify(copy, version)
    assert compute_digest(engine.params) != version.digest


def test_engine_leaves_the_callers_params_alone():
    params = jax.tree.map(jnp.copy, tiny_params())

    engine = make_engine(params=params)
    jax.tree.map(lambda leaf: leaf.delete(), params)

    assert_trees_close(engine.params, tiny_params(), rtol=0, atol=0)


def test_update_with_kl_to_a_reference_and_temperature():
    config = AlgorithmConfig(kl_coef=0.1)
    engine = make_engine(objective=grpo_objective(config, temperature=0.5, logprob_chunk=8))
    batch = make_batch()

    with pytest.raises(ValueError, match="needs ref_logp"):
        engine.update(batch)
    ref_logp = engine.logprobs(batch)
    other = engine.logprobs(batch, jax.tree.map(lambda w: 2 * w, tiny_params()))
    metrics = engine.update(batch, {"ref_logp": ref_logp})

    expected = np.asarray(reference_logp(tiny_params(), batch, 0.5))
    inside = (batch.positions > 0) & (batch.segment_ids > 0)
    got = np.asarray(ref_logp)
    np.testing.assert_allclose(got[inside], expected[inside], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[~inside], 0)
    assert np.abs(np.asarray(other) - got).max() > 1e-2
    assert float(metrics["kl"]) == pytest.approx(0, abs=1e-6)
    assert float(metrics["logp"]) == pytest.approx(expected[batch.loss_mask].mean(), rel=1e-5)
    assert engine.version == 1


def test_update_nonfinite_is_flagged_and_changes_no_bit():
    engine = reused_engine()
    engine.update(make_batch())
    before = compute_digest(engine.state)
    batch = make_batch(1)
    advantages = batch.advantages.copy()
    advantages[batch.loss_mask] = np.inf

    metrics = engine.update(dataclasses.replace(batch, advantages=advantages))

    assert float(metrics["nonfinite"]) == 1
    assert compute_digest(engine.state) == before
    assert float(engine.update(batch)["nonfinite"]) == 0
    assert compute_digest(engine.state) != before


def test_update_sft_with_a_plain_optax_optimizer_lowers_the_loss():
    engine = make_engine(objective=sft_objective(logprob_chunk=32), optimizer=optax.sgd(0.5))

    history = [numbers(engine.update(make_batch())) for _ in range(10)]

    assert history[-1]["loss"] < 0.95 * history[0]["loss"]
    assert set(history[0]) == {"loss", "nll", "entropy", "tokens", "grad_norm", "nonfinite"}


@pytest.mark.slow
def test_update_bfloat16_params_stay_bfloat16_and_compile_once():
    model = tiny_model(param_dtype="bfloat16", dtype="bfloat16")
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), tiny_params())
    engine = make_engine(model=model, params=params, micro_batches=2)

    engine.update(make_batch())
    metrics = engine.update(make_batch())

    assert {leaf.dtype for leaf in jax.tree.leaves(engine.params)} == {jnp.bfloat16.dtype}
    assert engine.compile_count == 1
    assert float(metrics["nonfinite"]) == 0


def test_update_rows_that_cannot_be_divided_are_refused():
    engine = make_engine(mesh=make_mesh(data=4, tensor=2), micro_batches=4)

    with pytest.raises(ValueError, match=rf"rows={ROWS} must be divisible by 16"):
        engine.update(make_batch())
    assert engine.version == 0


def test_update_array_of_another_shape_is_named():
    engine = reused_engine()
    extras = {"ref_logp": np.zeros((ROWS, LENGTH - 1), np.float32)}

    with pytest.raises(ValueError, match=r"ref_logp has shape"):
        engine.update(make_batch(), extras)


def test_engine_params_of_another_model_are_refused():
    params = jax.tree.map(lambda w: w, tiny_params())
    params["final_norm"] = {"scale": jnp.ones(3)}

    with pytest.raises(CheckpointError, match=r"final_norm/scale.*float32\[3\].*float32\[16\]"):
        make_engine(params=params)


def test_engine_without_micro_batches_is_refused():
    with pytest.raises(ValueError, match="micro_batches=0"):
        make_engine(micro_batches=0)

"""Only adapters are trained and stored, and checked together with the weights they belong to."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train.train_cases import make_batch, make_engine, tiny_model

from jaxrl.errors import CheckpointError, WeightVersionError
from jaxrl.models.lora import split_frozen
from jaxrl.models.model import init_params
from jaxrl.train.checkpoint import CheckpointStore
from jaxrl.weights.digest import stamp
from jaxrl.weights.exchange import publish
from jaxrl.weights.store import WeightStore


@pytest.fixture
def engine():
    model = tiny_model(lora_rank=2)
    return make_engine(model=model, params=init_params(model, 0))


def _equal(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def test_update_changes_adapters_and_nothing_else(engine):
    before, frozen = map(jax.device_get, split_frozen(engine.params))

    engine.update(make_batch(0))
    engine.update(make_batch(1))

    after, frozen_after = split_frozen(engine.params)
    assert _equal(frozen_after, frozen)
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), after, before)
    assert jax.tree.all(changed)
    moments = [leaf.shape for leaf in jax.tree.leaves(engine.state.opt_state) if leaf.ndim]
    assert sorted(moments) == sorted(2 * [leaf.shape for leaf in jax.tree.leaves(after)])


def test_publish_copies_adapters_only(engine):
    copy, version = publish(engine.params, 0)

    engine.update(make_batch())

    assert stamp(copy, 0) == version
    assert copy["embedding"] is engine.params["embedding"]


def test_store_holds_adapters_and_proves_all_weights(engine, tmp_path):
    engine.update(make_batch())
    params, version = publish(engine.params, 1)
    store = WeightStore(tmp_path)

    store.publish(params, version)

    assert all("_lora/" in name for name in store.stamp(1).tensors)
    abstract, frozen = engine.model.abstract, engine.frozen
    restored, found = store.restore(1, abstract, frozen=frozen)
    assert found == version
    assert _equal(restored, params)
    other = jax.tree.map(lambda x: x, frozen)
    other["embedding"] = frozen["embedding"].at[0, 0].add(1e-3)
    with pytest.raises(WeightVersionError, match="with the frozen weights: version 1 must have"):
        store.restore(1, abstract, frozen=other)
    for arguments in ((1, abstract), (1,)):
        with pytest.raises(CheckpointError, match="holds adapters only"):
            store.restore(*arguments)


def test_checkpoint_holds_adapters_and_goes_on_bit_for_bit(engine, tmp_path):
    engine.update(make_batch(0))
    version = stamp(engine.params, 1)
    with CheckpointStore(tmp_path) as store:
        meta = {"version": dataclasses.asdict(version)}
        store.save(1, engine.state, meta, frozen=engine.frozen)
        store.wait()
        engine.update(make_batch(1))
        want = stamp(engine.params, 2)
        model = tiny_model(lora_rank=2)
        again = make_engine(model=model, params=init_params(model, 0))

        state, _ = store.restore(again.abstract_state, 1, frozen=again.frozen)
        again.restore(state, version=1)
        again.update(make_batch(1))

        assert stamp(again.params, 2) == want
        shifted = jax.tree.map(lambda x: jnp.asarray(x) + 1, engine.frozen)
        with pytest.raises(WeightVersionError, match="with the frozen weights"):
            store.restore(again.abstract_state, 1, frozen=shifted)


def test_logprobs_use_the_adapters(engine):
    batch = make_batch()
    before = engine.logprobs(batch)

    engine.update(batch)

    assert np.abs(engine.logprobs(batch) - before).max() > 1e-3

"""Checkpoints of older releases: what no longer fits says how to go on."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train.train_cases import tiny_params

from jaxrl.errors import CheckpointError
from jaxrl.orchestration.recovery import Place, restore_engine
from jaxrl.train.checkpoint import CheckpointStore
from jaxrl.train.optimizer import adamw
from jaxrl.train.state import TrainState
from jaxrl.types import WeightVersion

SCHEDULE = optax.constant_schedule(1e-3)


def older_release(params) -> TrainState:
    """The state as it was before there was a field: moments have the type of their weights."""
    decays = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    inner = optax.adamw(SCHEDULE, weight_decay=0.0, mask=decays)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), inner)
    return TrainState(params, optimizer.init(params), jnp.int32(3))


def restore(tmp_path, old, params, phase="rl", **options):
    """The state that an engine of this release gets from a checkpoint that holds `old`."""
    optimizer = adamw(SCHEDULE, **options)
    new = jax.eval_shape(lambda: TrainState(params, optimizer.init(params), jnp.int32(0)))
    got = []
    with CheckpointStore(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, old, {})
        checkpoints.wait()
        ledger = types.SimpleNamespace(append=lambda *args, **fields: None)
        session = types.SimpleNamespace(checkpoints=checkpoints, ledger=ledger)
        engine = types.SimpleNamespace(
            abstract_state=new, frozen=None, restore=lambda state, version: got.append(state)
        )
        restore_engine(session, engine, Place(phase, WeightVersion(3, "0" * 64), {}, 0))
    return got[0]


def in_bfloat16(params):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


@pytest.mark.parametrize(("phase", "field"), [("rl", "train"), ("sft", "sft")])
def test_checkpoint_with_moments_of_an_older_release_names_the_field_that_reads_it(
    tmp_path, phase, field
):
    params = in_bfloat16(tiny_params())

    with pytest.raises(CheckpointError, match=f'{field}.moment_dtype="bfloat16"'):
        restore(tmp_path, older_release(params), params, phase)


def test_checkpoint_with_moments_of_an_older_release_is_read_with_that_field(tmp_path):
    params = in_bfloat16(tiny_params())
    old = older_release(params)

    state = restore(tmp_path, old, params, moment_dtype="bfloat16")

    jax.tree.map(np.testing.assert_array_equal, state, old)


def test_checkpoint_in_float32_of_an_older_release_is_read_as_it_is(tmp_path):
    old = older_release(tiny_params())

    state = restore(tmp_path, old, tiny_params())

    jax.tree.map(np.testing.assert_array_equal, state, old)

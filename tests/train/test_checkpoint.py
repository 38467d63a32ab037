"""Full checkpoints: bit-exact, whole or absent, verified, and safe while training goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from killing import kill_when_exists
from train.train_cases import make_batch, reused_engine

from jaxrl.errors import CheckpointError, OutputError, WeightVersionError
from jaxrl.sharding import make_mesh
from jaxrl.train.checkpoint import CheckpointStore
from jaxrl.train.state import TrainState
from jaxrl.weights.digest import compute_digest, stamp


def make_state(seed: int = 0, rows: int = 8) -> TrainState:
    """A state like that of Adam, without a model behind it."""
    rng = np.random.default_rng(seed)
    params = {"a": {"kernel": jnp.asarray(rng.normal(size=(rows, 4)), jnp.float32)}}
    moments = jax.tree.map(lambda w: w * 0.5, params)
    return TrainState(params, (moments, jnp.int32(seed)), jnp.int32(seed))


def abstract_of(state, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_restore_then_updates_equal_uninterrupted_updates_bit_for_bit(tmp_path):
    engine = reused_engine()
    for seed in range(5):
        engine.update(make_batch(seed))
    expected = compute_digest(engine.state)

    engine = reused_engine()
    with CheckpointStore(tmp_path) as store:
        for seed in range(3):
            engine.update(make_batch(seed))
        version = stamp(engine.params, engine.version)
        store.save(3, engine.state, {"version": dataclasses.asdict(version)})
        # Donates what is being written.
        engine.update(make_batch(99))
    engine = reused_engine()
    state, meta = CheckpointStore(tmp_path).restore(engine.abstract_state)
    engine.restore(state, version=meta["version"]["number"])
    for seed in range(3, 5):
        engine.update(make_batch(seed))

    assert engine.version == 5
    assert compute_digest(engine.state) == expected
    assert engine.compile_count == 1


def test_save_and_restore_keep_meta_and_structure(tmp_path):
    meta = {"seed": 3, "position": {"consumed": [1, 2]}, "name": "ünï", "none": None}
    state = make_state()

    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(7, state, meta)
        store.wait()
        restored, restored_meta = store.restore(state)

    assert restored_meta == meta == store.read_meta() == store.read_meta(7)
    assert isinstance(restored, TrainState)
    assert_same(restored, state)


@pytest.mark.parametrize("spec", [PartitionSpec("fsdp"), PartitionSpec(None, "tensor")])
def test_restore_on_another_mesh_gives_the_same_bits(tmp_path, spec):
    state = make_state()
    mesh = make_mesh(fsdp=4, tensor=2)
    abstract = abstract_of(state, NamedSharding(mesh, PartitionSpec()))
    sharded = NamedSharding(mesh, spec)
    kernel = abstract.params["a"]["kernel"]
    abstract.params["a"]["kernel"] = jax.ShapeDtypeStruct(
        kernel.shape, kernel.dtype, sharding=sharded
    )

    with CheckpointStore(tmp_path) as store:
        store.save(0, state, {})
        store.wait()
        restored, _ = store.restore(abstract)

    assert restored.params["a"]["kernel"].sharding == sharded
    assert_same(restored, state)


def test_save_keeps_the_last_and_counts_only_complete_ones(tmp_path):
    with CheckpointStore(tmp_path, keep=2) as store:
        assert store.latest() is None
        for step in (1, 2, 3, 10):
            store.save(step, make_state(step), {"step": step})
            store.wait()
            assert store.latest() == step

        assert store.steps() == [3, 10]
        assert sorted(os.listdir(tmp_path)) == ["10", "3"]
        assert store.read_meta(3) == {"step": 3}


def test_close_waits_for_the_last_save(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(4, make_state(4), {})

    assert CheckpointStore(tmp_path).latest() == 4


def test_restore_missing_step_lists_those_that_exist(tmp_path):
    with CheckpointStore(tmp_path) as store:
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            store.restore(make_state())
        store.save(2, make_state(), {})
        store.wait()
        with pytest.raises(CheckpointError, match=r"of step 5; there are: 2"):
            store.restore(make_state(), step=5)


def test_save_existing_step_is_refused(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(2, make_state(), {})
        with pytest.raises(CheckpointError, match="already holds a checkpoint of step 2"):
            store.save(2, make_state(), {})


def test_save_params_that_are_not_the_version_is_refused(tmp_path):
    version = stamp(make_state(1).params, 4)
    meta = {"version": dataclasses.asdict(version)}

    with CheckpointStore(tmp_path) as store:
        with pytest.raises(WeightVersionError, match="params to be saved"):
            store.save(4, make_state(2), meta)
        assert store.latest() is None
        store.save(4, make_state(1), meta)


def test_save_meta_that_is_not_json_is_refused(tmp_path):
    with CheckpointStore(tmp_path) as store:
        with pytest.raises(ValueError, match="must be JSON"):
            store.save(0, make_state(), {"key": object()})


def test_restore_other_shape_names_tensor_and_both_shapes(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(0, make_state(), {})
        store.wait()
        with pytest.raises(CheckpointError) as error:
            store.restore(make_state(rows=6))

    text = "'params/a/kernel' is stored as float32[8, 4]; the model has float32[6, 4]"
    assert text in str(error.value)
    assert "opt_state/0/a/kernel" in str(error.value)


def edit_record(folder: Path, edit) -> None:
    path = folder / "record" / "metadata"
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def test_restore_other_weights_than_the_version_names_both_digests(tmp_path):
    state = make_state()
    version = stamp(state.params, 1)
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, {"version": dataclasses.asdict(version)})
        store.wait()
        edit_record(tmp_path / "1", lambda r: r["meta"]["version"].update(digest="cd" * 32))
        with pytest.raises(WeightVersionError) as error:
            store.restore(state)

    assert version.digest in str(error.value)
    assert "cd" * 32 in str(error.value)


def test_restore_damaged_optimizer_state_is_an_error(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(1, make_state(), {})
        store.wait()
        edit_record(tmp_path / "1", lambda r: r.update(digest="ef" * 32))
        with pytest.raises(CheckpointError, match=r"damaged: the state was saved with digest efef"):
            store.restore(make_state())


def test_restore_damaged_files_is_an_error(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(1, make_state(rows=512), {})
        store.wait()
        files = [p for p in (tmp_path / "1" / "state").rglob("*") if p.is_file()]
        victim = max(files, key=lambda p: p.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 0x10
        victim.write_bytes(content)
        with pytest.raises((CheckpointError, WeightVersionError)):
            store.restore(make_state(rows=512))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_failed_save_is_an_output_error_and_the_next_one_works(tmp_path, capfd):
    state = make_state(rows=65536)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointStore(tmp_path) as store:
        store.save(1, make_state(1), {})
        store.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (32768, limits[1]))
        try:
            with pytest.raises(OutputError) as error:
                store.save(2, state, {})
                store.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(tmp_path / "2") in str(error.value)
        assert store.latest() == 1
        # Another step: threads of the failed one may go on with its files for a moment.
        store.save(3, state, {})
        store.wait()
        assert store.steps() == [1, 3]
    assert capfd.readouterr() == ("", "")


CHILD = """
import sys, jax.numpy as jnp, numpy as np
from jaxrl.train.checkpoint import CheckpointStore
from jaxrl.train.state import TrainState
store = CheckpointStore(sys.argv[1])
def state(rows):
    params = {"w": jnp.asarray(np.random.default_rng(rows).integers(-9, 9, (rows, 1024), np.int32))}
    return TrainState(params, (params,), jnp.int32(rows))
store.save(1, state(4), {"step": 1})
store.wait()
store.save(2, state(16384), {"step": 2})
store.wait()
"""


@pytest.mark.slow
def test_process_killed_while_saving_leaves_the_one_before(tmp_path):
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    kill_when_exists(CHILD, tmp_path, unfinished)
    assert unfinished.exists(), "the child was not killed within its second save"

    params = {"w": jax.ShapeDtypeStruct((4, 1024), jnp.int32)}
    like = TrainState(params, (params,), jax.ShapeDtypeStruct((), jnp.int32))
    with CheckpointStore(tmp_path) as store:
        state, meta = store.restore(like)
        assert meta == {"step": 1}
        assert int(state.step) == 4
        store.save(2, state, {"step": 2})
    assert CheckpointStore(tmp_path).steps() == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]

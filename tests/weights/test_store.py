"""The store of published versions: verified, whole or absent, and clear about what is wrong."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from killing import kill_when_exists

from jaxrl.errors import CheckpointError, OutputError, WeightVersionError
from jaxrl.sharding import make_mesh
from jaxrl.types import WeightVersion
from jaxrl.weights.digest import compute_digest, stamp
from jaxrl.weights.store import WeightStore


def make_params(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "layers": {"0": {"kernel": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)}},
        "embedding": jnp.asarray(rng.normal(size=(32, 16)), jnp.bfloat16),
        "scale": jnp.asarray(rng.normal(size=(16,)), jnp.float32),
    }


def abstract_of(params):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def publish(store: WeightStore, number: int, **kwargs) -> tuple[dict, WeightVersion]:
    params = make_params(number)
    version = stamp(params, number)
    assert store.publish(params, version, **kwargs)
    return params, version


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_publish_then_restore_gives_the_same_bits_and_stamp(tmp_path):
    store = WeightStore(tmp_path / "weights")
    params, version = publish(store, 3, metadata={"step": 3, "name": "a run"})

    restored, restored_version = store.restore(3, abstract_of(params))

    assert restored_version == version
    assert_same(restored, params)
    found = store.stamp(3)
    assert found.version == version
    assert found.metadata == {"step": 3, "name": "a run"}
    assert found.tensors["layers/0/kernel"] == ((16, 8), "float32")
    assert found.tensors["embedding"] == ((32, 16), "bfloat16")
    assert found.time.endswith("+00:00")


def test_restore_without_abstract_gives_nested_dicts(tmp_path):
    store = WeightStore(tmp_path)
    params, _ = publish(store, 0)

    restored, _ = store.restore(0)

    assert_same(restored, params)


def test_restore_without_number_gives_the_latest(tmp_path):
    store = WeightStore(tmp_path)
    for number in (0, 2, 10):
        params, version = publish(store, number)

    restored, restored_version = store.restore()

    assert restored_version == version == store.latest()
    assert store.numbers() == [0, 2, 10]
    assert [v.number for v in store.versions()] == [0, 2, 10]
    assert_same(restored, params)


LAYOUTS = [
    ({"data": 8}, PartitionSpec()),
    ({"fsdp": 8}, PartitionSpec("fsdp")),
    ({"fsdp": 4, "tensor": 2}, PartitionSpec(("tensor", "fsdp"))),
]


@pytest.mark.parametrize(("axes", "spec"), LAYOUTS, ids=["data8", "fsdp8", "tensor2 fsdp4"])
def test_publish_from_one_mesh_restores_on_another(tmp_path, axes, spec):
    params = make_params()
    source = NamedSharding(make_mesh(fsdp=2, tensor=4), PartitionSpec("fsdp"))
    target = NamedSharding(make_mesh(**axes), spec)
    store = WeightStore(tmp_path)
    store.publish(jax.device_put(params, source), stamp(params, 1))

    restored, version = store.restore(1, abstract_of(params), target)

    assert all(leaf.sharding == target for leaf in jax.tree.leaves(restored))
    assert_same(restored, params)
    assert compute_digest(restored) == version.digest


def test_publish_same_number_and_digest_does_nothing(tmp_path):
    store = WeightStore(tmp_path)
    params, version = publish(store, 1)
    before = (tmp_path / "1" / "stamp" / "metadata").stat().st_mtime_ns

    assert store.publish(params, version) is False
    assert (tmp_path / "1" / "stamp" / "metadata").stat().st_mtime_ns == before


def test_publish_same_number_other_digest_names_both(tmp_path):
    store = WeightStore(tmp_path)
    _, version = publish(store, 1)
    other = make_params(99)
    other_version = stamp(other, 1)

    with pytest.raises(WeightVersionError) as error:
        store.publish(other, other_version)

    assert version.digest in str(error.value)
    assert other_version.digest in str(error.value)


def test_publish_wrong_digest_is_refused_and_writes_nothing(tmp_path):
    store = WeightStore(tmp_path / "weights")

    with pytest.raises(WeightVersionError, match="to be published"):
        store.publish(make_params(0), stamp(make_params(1), 4))

    assert not (tmp_path / "weights").exists()


def test_publish_metadata_that_is_not_json_is_refused(tmp_path):
    params = make_params()

    with pytest.raises(ValueError, match="must be JSON"):
        WeightStore(tmp_path).publish(params, stamp(params, 0), metadata={"x": float("nan")})


def test_restore_missing_version_lists_those_that_exist(tmp_path):
    store = WeightStore(tmp_path)
    publish(store, 1)
    publish(store, 5)

    with pytest.raises(CheckpointError, match=r"no complete version 3; there are: 1, 5"):
        store.restore(3)


def test_restore_from_empty_store_names_its_path(tmp_path):
    store = WeightStore(tmp_path / "nothing", read_only=True)

    assert store.latest() is None
    assert store.numbers() == []
    with pytest.raises(CheckpointError, match="nothing holds no weight version"):
        store.restore()
    assert not (tmp_path / "nothing").exists()


def test_restore_other_shape_names_tensor_and_both_shapes(tmp_path):
    store = WeightStore(tmp_path)
    params, _ = publish(store, 0)
    abstract = abstract_of(params)
    abstract["layers"]["0"]["kernel"] = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    abstract["scale"] = jax.ShapeDtypeStruct((16,), jnp.bfloat16)
    abstract["extra"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    del abstract["embedding"]

    with pytest.raises(CheckpointError) as error:
        store.restore(0, abstract)

    message = str(error.value)
    assert "'layers/0/kernel' is stored as float32[16, 8]; the model has float32[16, 4]" in message
    assert "'scale' is stored as float32[16]; the model has bfloat16[16]" in message
    assert "'extra' is not stored; the model has float32[2]" in message
    assert "'embedding' is stored as bfloat16[32, 16]; the model has none" in message


def edit_stamp(folder: Path, **changes) -> None:
    path = folder / "stamp" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_restore_of_weights_under_a_wrong_stamp_names_both_digests(tmp_path):
    store = WeightStore(tmp_path)
    params, version = publish(store, 0)
    edit_stamp(tmp_path / "0", digest="ab" * 32)

    with pytest.raises(WeightVersionError) as error:
        store.restore(0, abstract_of(params))

    assert version.digest in str(error.value)
    assert "ab" * 32 in str(error.value)
    assert str(tmp_path / "0") in str(error.value)


def test_restore_of_a_renamed_version_is_refused(tmp_path):
    store = WeightStore(tmp_path)
    publish(store, 0)
    shutil.copytree(tmp_path / "0", tmp_path / "7")

    with pytest.raises(WeightVersionError, match="stamp of version 0, not of 7"):
        store.restore(7)


def data_files(folder: Path) -> list[Path]:
    """Files of one version, largest first, without the stamp and notes that nobody reads."""
    files = [p for p in (folder / "params").rglob("*") if p.is_file() and "commit" not in p.name]
    return sorted(files, key=lambda p: -p.stat().st_size)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_restore_of_damaged_data_is_an_error(tmp_path, damage):
    store = WeightStore(tmp_path)
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)}
    store.publish(params, stamp(params, 0))
    victim = data_files(tmp_path / "0")[0]
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 0x10
        victim.write_bytes(content)
    elif damage == "truncate":
        victim.write_bytes(content[: len(content) // 2])
    else:
        victim.unlink()

    with pytest.raises((CheckpointError, WeightVersionError)) as error:
        store.restore(0, abstract_of(params))

    assert str(tmp_path / "0") in str(error.value)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 1}', '{"format": 99}', "[" * 100_000], ids=lambda x: x[:12]
)
def test_restore_with_damaged_stamp_is_an_error(tmp_path, content):
    store = WeightStore(tmp_path)
    publish(store, 0)
    (tmp_path / "0" / "stamp" / "metadata").write_text(content)

    with pytest.raises(CheckpointError, match="stamp"):
        store.restore(0)


def test_prune_keeps_first_last_and_pinned(tmp_path):
    store = WeightStore(tmp_path)
    for number in (0, 1, 2, 3, 4):
        publish(store, number)

    deleted = store.prune(pinned=[2])

    assert deleted == [1, 3]
    assert store.numbers() == [0, 2, 4]
    assert sorted(os.listdir(tmp_path)) == ["0", "2", "4"]
    assert store.prune(keep_last=2, pinned=[]) == []
    store.restore(2)


def test_read_only_store_refuses_to_write(tmp_path):
    publish(WeightStore(tmp_path), 0)
    store = WeightStore(tmp_path, read_only=True)
    params = make_params(1)

    with pytest.raises(CheckpointError, match="read-only"):
        store.publish(params, stamp(params, 1))
    with pytest.raises(CheckpointError, match="read-only"):
        store.prune()
    assert store.restore(0)[1].number == 0


def test_foreign_and_unfinished_directories_are_no_versions(tmp_path):
    store = WeightStore(tmp_path)
    publish(store, 1)
    for name in ("2.orbax-checkpoint-tmp", "007", "3.deleted", "notes", "5"):
        (tmp_path / name).mkdir()

    assert store.numbers() == [1]
    publish(store, 2)
    assert store.numbers() == [1, 2]


def test_publish_into_a_path_that_cannot_be_a_directory_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("")
    params = make_params()

    with pytest.raises(OutputError) as error:
        WeightStore(tmp_path / "file" / "weights").publish(params, stamp(params, 0))

    assert str(tmp_path / "file" / "weights") in str(error.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_publish_when_the_disk_refuses_bytes_is_an_output_error(tmp_path):
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)}
    version = stamp(params, 0)
    store = WeightStore(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32768, limits[1]))
    try:
        with pytest.raises(OutputError) as error:
            store.publish(params, version)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert str(tmp_path / "0") in str(error.value)
    assert store.numbers() == []
    assert store.publish(params, version)


def test_publish_and_restore_print_and_log_nothing(tmp_path, capfd, caplog):
    caplog.set_level("INFO")
    store = WeightStore(tmp_path)
    publish(store, 0)
    (tmp_path / "1.orbax-checkpoint-tmp").mkdir()
    publish(store, 1)
    store.restore(1)

    assert capfd.readouterr() == ("", "")
    assert [record.getMessage() for record in caplog.records] == []


CHILD = """
import sys, numpy as np, jax.numpy as jnp
from jaxrl.weights.digest import stamp
from jaxrl.weights.store import WeightStore
store = WeightStore(sys.argv[1])
rng = np.random.default_rng(0)
small = {"w": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}
large = {"w": jnp.asarray(rng.integers(-99, 99, (4096, 4096), np.int32))}
store.publish(small, stamp(small, 1))
store.publish(large, stamp(large, 2))
"""


@pytest.mark.slow
def test_process_killed_while_publishing_leaves_earlier_versions(tmp_path):
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    kill_when_exists(CHILD, tmp_path, unfinished)
    assert unfinished.exists(), "the child was not killed within its second publish"

    store = WeightStore(tmp_path)
    assert store.numbers() == [1]
    assert store.restore()[1].number == 1
    params, version = publish(store, 2)
    restored, restored_version = store.restore()
    assert restored_version == version
    assert_same(restored, params)
    assert not unfinished.exists()


READER = """
import sys, jax
from jaxrl.weights.store import WeightStore
store = WeightStore(sys.argv[1], read_only=True)
seen = set()
print("ready", flush=True)
while 12 not in seen:
    version = store.latest()
    if version is None or version.number in seen:
        continue
    try:
        _, read = store.restore(version.number)
    except Exception as error:
        if version.number in store.numbers():
            raise
        continue
    assert read == version
    seen.add(version.number)
print("read", len(seen), flush=True)
"""


@pytest.mark.slow
def test_reader_follows_a_writer_that_publishes_and_prunes(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "ready\n"
        store = WeightStore(tmp_path)
        for number in range(13):
            publish(store, number)
            store.prune()
        out, _ = child.communicate(timeout=120)
    finally:
        child.kill()
        child.wait()

    assert child.returncode == 0
    assert out.startswith("read ")


def test_discard_after_deletes_later_versions_and_their_numbers_are_free(tmp_path):
    store = WeightStore(tmp_path / "weights")
    for number in (2, 3, 5):
        publish(store, number)

    assert store.discard_after(2) == [3, 5]
    assert store.discard_after(2) == []

    assert store.numbers() == [2]
    params = make_params(9)
    assert store.publish(params, stamp(params, 3))

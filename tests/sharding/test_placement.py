"""Trees land where the rules say, with the same numbers, and never share memory with their
source."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxrl.sharding import Rules, make_mesh, place, placement, reshard, shardings_of

RULES = Rules({"embed": "fsdp", "heads": "tensor", "batch": ("data", "fsdp")})
AXES = {"query": ("embed", "heads"), "scale": None, "step": ()}


def _tree() -> dict[str, np.ndarray]:
    return {
        "query": np.arange(16.0 * 4, dtype=np.float32).reshape(16, 4),
        "scale": np.arange(3.0, dtype=np.float32),
        "step": np.int32(7),
    }


def _pointers(tree) -> set[int]:
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    }


def _assert_same_numbers(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


def test_shardings_of_tree_of_names_gives_a_sharding_per_leaf():
    mesh = make_mesh(fsdp=4, tensor=2)

    shardings = shardings_of(_tree(), mesh, RULES, AXES)

    assert shardings["query"] == NamedSharding(mesh, P("fsdp", "tensor"))
    assert shardings["scale"].is_fully_replicated
    assert shardings["step"] == NamedSharding(mesh, P())


def test_shardings_of_function_gets_path_and_leaf():
    tree = {"layers": [{"w": jnp.ones((4, 2))}, {"w": jnp.ones((8, 2))}]}
    seen = {}

    def axes_of(path, leaf):
        seen[path] = leaf.shape
        return ("embed", None)

    shardings = shardings_of(tree, make_mesh(fsdp=4, tensor=2), RULES, axes_of)

    assert seen == {"layers/0/w": (4, 2), "layers/1/w": (8, 2)}
    assert shardings["layers"][1]["w"].spec == P("fsdp", None)


def test_shardings_of_indivisible_error_lists_path_dimension_and_sizes():
    tree = {
        "a": {"query": jax.ShapeDtypeStruct((16, 9), jnp.float32)},
        "b": jax.ShapeDtypeStruct((6, 5), jnp.float32),
    }
    axes = {"a": {"query": ("embed", "heads")}, "b": ("batch", None)}

    with pytest.raises(ValueError) as caught:
        shardings_of(tree, make_mesh(data=2, fsdp=2, tensor=2), RULES, axes)

    message = str(caught.value)
    assert (
        "'a/query' (16, 9): dimension 1 ('heads') of size 9 must be divisible by tensor=2"
        in message
    )
    assert (
        "'b' (6, 5): dimension 0 ('batch') of size 6 must be divisible by data=2 x fsdp=2"
        in message
    )


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("embed",), r"'query'.*\(16, 4\).*2 logical axes"),
        ("embed", "2 logical axes"),
        (("embed", "haeds"), "'query'.*'haeds'.*known"),
        (("batch", "embed"), "'query'.*twice"),
    ],
)
def test_shardings_of_wrong_names_error_names_the_path(names, words):
    with pytest.raises(ValueError, match=words):
        shardings_of({"query": np.ones((16, 4))}, make_mesh(data=8), RULES, {"query": names})


def test_shardings_of_tree_of_another_structure_is_an_error():
    with pytest.raises(ValueError):
        shardings_of(_tree(), make_mesh(data=8), RULES, {"query": ("embed", "heads")})


def test_place_numbers_and_shards_are_those_of_the_source():
    placed = place(_tree(), make_mesh(fsdp=4, tensor=2), RULES, axes_of=AXES)

    _assert_same_numbers(placed, _tree())
    for shard in placed["query"].addressable_shards:
        np.testing.assert_array_equal(shard.data, _tree()["query"][shard.index])
        assert shard.data.shape == (4, 2)


def test_place_numpy_source_changed_afterwards_does_not_show():
    tree = {"w": np.ones((64, 64), np.float32)}

    placed = place(tree, make_mesh(data=8), RULES, axes_of={"w": None})
    tree["w"][:] = 5.0

    np.testing.assert_array_equal(placed["w"], np.ones((64, 64)))


def _targets() -> dict[str, tuple]:
    devices = jax.devices()
    four, two = devices[:4], devices[6:]
    whole = make_mesh(fsdp=4, tensor=2)
    return {
        "same": (whole, whole),
        "same devices, other axes": (whole, make_mesh(tensor=2, fsdp=2, data=2)),
        "same devices, other order": (whole, make_mesh(fsdp=8, devices=devices[::-1])),
        "other devices": (make_mesh(fsdp=4, devices=four), make_mesh(tensor=2, devices=two)),
        "some devices": (make_mesh(fsdp=2, devices=four[:2]), make_mesh(fsdp=4, devices=four)),
        "one device to all": (make_mesh(devices=devices[:1]), make_mesh(data=8)),
        "all to one device": (make_mesh(data=8), make_mesh(devices=devices[:1])),
        "replicated to split": (make_mesh(data=8), make_mesh(fsdp=8)),
    }


CASES = (
    "same",
    "same devices, other axes",
    "same devices, other order",
    "other devices",
    "some devices",
    "one device to all",
    "all to one device",
    "replicated to split",
)


@pytest.mark.parametrize("case", CASES)
def test_reshard_between_meshes_keeps_numbers_and_shares_no_memory(case):
    source_mesh, target_mesh = _targets()[case]
    source = place(_tree(), source_mesh, RULES, axes_of=AXES)
    shardings = shardings_of(source, target_mesh, RULES, AXES)

    moved = reshard(source, shardings)

    _assert_same_numbers(moved, _tree())
    assert jax.tree.map(lambda x: x.sharding, moved) == shardings
    assert _pointers(source).isdisjoint(_pointers(moved))


@pytest.mark.parametrize("case", CASES)
def test_reshard_source_donated_afterwards_leaves_the_copy_alone(case):
    source_mesh, target_mesh = _targets()[case]
    source = place(_tree(), source_mesh, RULES, axes_of=AXES)
    moved = reshard(source, shardings_of(source, target_mesh, RULES, AXES))
    add_one = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)

    updated = add_one(source)

    _assert_same_numbers(moved, _tree())
    _assert_same_numbers(updated, jax.tree.map(lambda x: x + 1, _tree()))


def test_reshard_one_sharding_for_all_also_of_host_arrays():
    sharding = SingleDeviceSharding(jax.devices()[3])

    moved = reshard({"a": jnp.ones(3), "b": np.zeros(2, np.int32), "c": 1.5}, sharding)

    assert {leaf.sharding for leaf in jax.tree.leaves(moved)} == {sharding}
    assert moved["c"] == 1.5
    assert moved["b"].dtype == np.int32


def test_reshard_keeps_dtypes_and_random_keys():
    tree = {"half": jnp.ones(8, jnp.bfloat16), "key": jax.random.key(3)}

    moved = reshard(tree, NamedSharding(make_mesh(data=8), P()))

    assert moved["half"].dtype == jnp.bfloat16
    assert jnp.array_equal(jax.random.key_data(moved["key"]), jax.random.key_data(tree["key"]))


def test_reshard_mesh_of_another_project():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, P("y", "x"))

    moved = reshard(jnp.arange(32.0).reshape(4, 8), sharding)

    assert moved.sharding == sharding
    np.testing.assert_array_equal(moved, np.arange(32.0).reshape(4, 8))


def test_reshard_repeated_compiles_once():
    source = place(_tree(), make_mesh(fsdp=4, tensor=2), RULES, axes_of=AXES)
    shardings = jax.tree.map(lambda x: x.sharding, source)

    for _ in range(3):
        reshard(source, shardings)

    copy = placement._copier(tuple(jax.tree.leaves(shardings)))
    assert copy._cache_size() == 1

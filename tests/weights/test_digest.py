"""The digest: the same for any layout, another one for any change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.errors import WeightVersionError
from jaxrl.sharding import make_mesh
from jaxrl.types import WeightVersion
from jaxrl.weights import digest as digest_module
from jaxrl.weights.digest import compute_digest, named_leaves, stamp, verify

PINNED = "3166a06486022db46fc32477dcae3f0848338e67370259e74b961692783afb1e"


def fixed_tree() -> dict:
    """Numbers without any rounding, the same on every machine and version of numpy."""
    words = (np.arange(8 * 16, dtype=np.uint32) * np.uint32(2654435761)).reshape(8, 16)
    return {
        "layers": {
            "0": {"kernel": words.view(np.float32), "scale": np.arange(16, dtype=np.float32)}
        },
        "half": (np.arange(32) / 4).astype(jnp.bfloat16).reshape(8, 4),
        "ints": np.arange(-8, 8, dtype=np.int8),
        "flag": np.array([True, False]),
        "scalar": np.array(-0.0, np.float32),
    }


def on_devices(tree: dict) -> dict:
    return jax.tree.map(jnp.asarray, tree)


def test_compute_digest_fixed_tree_is_pinned():
    assert compute_digest(on_devices(fixed_tree())) == PINNED


def test_compute_digest_numpy_and_jax_arrays_agree():
    assert compute_digest(fixed_tree()) == PINNED


MESHES = {
    "data8": ({"data": 8}, PartitionSpec()),
    "fsdp8": ({"fsdp": 8}, PartitionSpec("fsdp")),
    "fsdp4 tensor2": ({"fsdp": 4, "tensor": 2}, PartitionSpec("fsdp", "tensor")),
    "transposed": ({"fsdp": 4, "tensor": 2}, PartitionSpec("tensor", "fsdp")),
    "joined": ({"data": 2, "fsdp": 2, "tensor": 2}, PartitionSpec(("fsdp", "data"))),
    "second dimension": ({"data": 4, "tensor": 2}, PartitionSpec(None, ("tensor", "data"))),
}


@pytest.mark.parametrize(("axes", "spec"), MESHES.values(), ids=list(MESHES))
def test_compute_digest_sharded_equals_single_device(axes, spec):
    rng = np.random.default_rng(0)
    tree = {
        "matrix": jnp.asarray(rng.integers(-100, 100, (16, 8)), jnp.float32),
        "cube": jnp.asarray(rng.integers(-100, 100, (8, 8, 3)), jnp.bfloat16),
        "bytes": jnp.asarray(rng.integers(-100, 100, (8, 16)), jnp.int8),
        "vector": jnp.asarray(rng.integers(-100, 100, (5,)), jnp.float32),
    }
    mesh = make_mesh(**axes)
    specs = dict.fromkeys(tree, spec) | {"vector": PartitionSpec()}
    sharded = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree.items()}

    assert compute_digest(sharded) == compute_digest(tree)


def test_compute_digest_part_of_tree_without_sharding_equals_single_device():
    tree = on_devices(fixed_tree())
    expected = compute_digest(tree)
    mesh = make_mesh(data=8)
    tree["half"] = jax.device_put(tree["half"], NamedSharding(mesh, PartitionSpec("data")))

    assert compute_digest(tree) == expected


def test_compute_digest_sharded_gathers_no_weights():
    mesh = make_mesh(fsdp=4, tensor=2)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    leaves = [jax.device_put(jnp.ones((64, 64)), sharding) for _ in range(2)]
    program = digest_module._program(("a", "b"), *digest_module._layout(leaves))

    text = program.lower(leaves).compile().as_text()

    assert text.count(" all-reduce(") == 1
    assert " all-gather(" not in text
    assert " collective-permute(" not in text


def flip_bit(tree):
    words = tree["layers"]["0"]["kernel"].copy().view(np.uint32)
    words[3, 5] ^= 1
    tree["layers"]["0"]["kernel"] = words.view(np.float32)


def flip_top_bits_of_two(tree):
    words = tree["layers"]["0"]["kernel"].copy().view(np.uint32)
    words[3, 5] ^= 1 << 31
    words[6, 1] ^= 1 << 31
    tree["layers"]["0"]["kernel"] = words.view(np.float32)


def swap_elements(tree):
    tree["ints"] = tree["ints"].copy()
    tree["ints"][[2, 9]] = tree["ints"][[9, 2]]


def swap_rows(tree):
    kernel = tree["layers"]["0"]["kernel"]
    tree["layers"]["0"]["kernel"] = kernel[[1, 0, *range(2, 8)]]


def swap_leaves(tree):
    other = np.arange(1, 17, dtype=np.float32)
    tree["other"], tree["layers"]["0"]["scale"] = tree["layers"]["0"]["scale"], other


def add_other(tree):
    tree["other"] = np.arange(1, 17, dtype=np.float32)


def rename(tree):
    tree["layers"]["1"] = tree["layers"].pop("0")


def reshape(tree):
    tree["half"] = tree["half"].reshape(4, 8)


def add_unit_dimension(tree):
    tree["half"] = tree["half"][None]


def change_dtype(tree):
    tree["ints"] = tree["ints"].astype(np.int16)


def reinterpret(tree):
    tree["layers"]["0"]["kernel"] = tree["layers"]["0"]["kernel"].view(np.int32)


def positive_zero(tree):
    tree["scalar"] = np.zeros((), np.float32)


def drop_leaf(tree):
    del tree["flag"]


CHANGES = [
    flip_bit, flip_top_bits_of_two, swap_elements, swap_rows, add_other, swap_leaves, rename,
    reshape, add_unit_dimension, change_dtype, reinterpret, positive_zero, drop_leaf,
]  # fmt: skip


def test_compute_digest_each_change_gives_another():
    digests = {PINNED: "unchanged"}
    for change in CHANGES:
        tree = fixed_tree()
        change(tree)
        digest = compute_digest(on_devices(tree))

        assert digest not in digests, f"{change.__name__} gives the digest of {digests[digest]}"
        digests[digest] = change.__name__


def test_compute_digest_nan_payload_counts():
    quiet = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)

    assert compute_digest({"x": quiet[:1]}) != compute_digest({"x": quiet[1:]})
    assert compute_digest({"x": quiet[:1]}) == compute_digest({"x": quiet[:1].copy()})


def test_lanes_match_a_plain_count():
    x = np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5
    salt = digest_module._constants("leaf x")
    steps = [digest_module._constants(f"dimension {d}") for d in range(2)]

    def mix(v: int) -> int:
        v = ((v ^ (v >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        v = ((v ^ (v >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return v ^ (v >> 16)

    expected = [0, 0, 0, 0]
    for lane in range(4):
        for i in range(2):
            for j in range(3):
                key = salt[lane] + i * (steps[0][lane] | 1) + j * (steps[1][lane] | 1)
                word = int(x[i, j : j + 1].view(np.uint32)[0]) ^ (key & 0xFFFFFFFF)
                expected[lane] = (expected[lane] + mix(word)) & 0xFFFFFFFF

    np.testing.assert_array_equal(digest_module._lanes(jnp.asarray(x), salt), expected)


def test_compute_digest_empty_leaf_and_empty_tree_work():
    assert compute_digest({"x": jnp.zeros((0, 3))}) != compute_digest({"x": jnp.zeros((3, 0))})
    assert len(compute_digest({})) == 64


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.zeros(2, np.complex64), "complex64"),
        (np.zeros(2, np.float64), "float64"),
        (3.0, "not an array"),
        (np.zeros(2, jnp.int4), "narrower than a byte"),
    ],
)
def test_compute_digest_leaf_without_plain_bits_is_refused(leaf, message):
    with pytest.raises(ValueError, match=message) as error:
        compute_digest({"a": {"b": leaf}})

    assert "a/b" in str(error.value)


def test_compute_digest_random_key_is_refused():
    with pytest.raises(ValueError, match="no plain bits"):
        compute_digest({"key": jax.random.key(0)})


def test_named_leaves_ambiguous_name_is_refused():
    with pytest.raises(ValueError, match="a/b"):
        named_leaves({"a/b": np.zeros(1), "a": {"b": np.zeros(1)}})


def test_stamp_and_verify_round_trip():
    tree = on_devices(fixed_tree())

    version = stamp(tree, 7)

    assert version == WeightVersion(7, PINNED)
    verify(tree, version)


def test_verify_other_weights_names_both_digests():
    tree = on_devices(fixed_tree())
    version = stamp(tree, 7)
    tree["flag"] = ~tree["flag"]

    with pytest.raises(WeightVersionError) as error:
        verify(tree, version, source="the test")

    message = str(error.value)
    assert version.digest in message
    assert compute_digest(tree) in message
    assert "the test" in message
    assert "version 7" in message

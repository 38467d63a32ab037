"""Copies in memory never share memory with the trainer's weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrl.errors import WeightVersionError
from jaxrl.sharding import make_mesh
from jaxrl.types import WeightVersion
from jaxrl.weights.digest import compute_digest, verify
from jaxrl.weights.exchange import copy_to, publish, publish_to_sampler


def layouts() -> dict:
    """Layout name -> sharding for [8, 8] arrays."""
    devices = jax.devices()
    half = make_mesh(fsdp=4, devices=devices[:4])
    other_half = make_mesh(tensor=4, devices=devices[4:])
    full = make_mesh(fsdp=4, tensor=2)
    return {
        "single": SingleDeviceSharding(devices[0]),
        "other single": SingleDeviceSharding(devices[5]),
        "replicated": NamedSharding(full, PartitionSpec()),
        "sharded": NamedSharding(full, PartitionSpec("fsdp", "tensor")),
        "half": NamedSharding(half, PartitionSpec("fsdp")),
        "other half": NamedSharding(other_half, PartitionSpec(None, "tensor")),
    }


NAMES = ["single", "other single", "replicated", "sharded", "half", "other half"]


@pytest.mark.parametrize("source", NAMES)
def test_copy_to_any_layout_survives_donation_of_its_source(source):
    for target in NAMES:
        shardings = layouts()
        params = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), shardings[source])}

        copy = copy_to(params, shardings[target])
        step = jax.jit(lambda p: jax.tree.map(lambda x: -x, p), donate_argnums=0)
        after = step(params)

        assert copy["w"].sharding.is_equivalent_to(shardings[target], 2), target
        np.testing.assert_array_equal(copy["w"], np.arange(64.0).reshape(8, 8), target)
        np.testing.assert_array_equal(after["w"], -np.arange(64.0).reshape(8, 8), target)


def test_copy_to_without_shardings_keeps_them():
    sharding = layouts()["sharded"]
    params = {"w": jax.device_put(jnp.ones((8, 8)), sharding)}

    copy = copy_to(params)

    assert copy["w"].sharding == sharding
    ours = {shard.data.unsafe_buffer_pointer() for shard in params["w"].addressable_shards}
    theirs = {shard.data.unsafe_buffer_pointer() for shard in copy["w"].addressable_shards}
    assert not ours & theirs


def test_publish_gives_copy_and_version_of_the_source():
    params = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), layouts()["sharded"])}

    copy, version = publish(params, 3, layouts()["other half"])
    params["w"].delete()

    assert version.number == 3
    verify(copy, version)
    np.testing.assert_array_equal(copy["w"], np.arange(64.0).reshape(8, 8))


def sampled_tree(sharding):
    """(params on `sharding`, the dtypes of a sampler's copy, where its arrays lie)."""
    sampler = make_mesh(tensor=2, data=4)
    params = {
        "scale": jax.device_put(
            jnp.linspace(0.5, 1.5, 8), NamedSharding(sharding.mesh, PartitionSpec())
        ),
        "w": jax.device_put(jnp.linspace(-1, 1, 64).reshape(8, 8), sharding),
    }
    abstract = {
        "scale": jax.ShapeDtypeStruct((8,), jnp.float32),
        "w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16),
    }
    shardings = {
        "scale": NamedSharding(sampler, PartitionSpec()),
        "w": NamedSharding(sampler, PartitionSpec(None, "tensor")),
    }
    return params, abstract, shardings


def test_publish_to_sampler_casts_moves_and_gives_both_digests():
    params, abstract, shardings = sampled_tree(layouts()["sharded"])

    copy, version, digest = publish_to_sampler(params, 5, abstract, shardings)

    verify(params, version)
    assert version.number == 5
    assert copy["w"].sharding == shardings["w"]
    assert digest == compute_digest({**params, "w": params["w"].astype(jnp.bfloat16)})
    verify(copy, WeightVersion(5, digest))


@pytest.mark.parametrize("moved", [True, False])
def test_publish_to_sampler_copy_survives_donation_of_what_is_trained(moved):
    params, abstract, shardings = sampled_tree(layouts()["sharded"])
    if not moved:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    expected = np.asarray(params["w"].astype(jnp.bfloat16))
    expected_scale = np.array(params["scale"])

    copy, _, _ = publish_to_sampler(params, 0, abstract, shardings)
    jax.jit(lambda p: jax.tree.map(lambda x: -x, p), donate_argnums=0)(params)

    np.testing.assert_array_equal(copy["w"], expected)
    np.testing.assert_array_equal(copy["scale"], expected_scale)


def test_publish_to_sampler_in_the_same_dtypes_has_one_digest():
    params, abstract, shardings = sampled_tree(layouts()["sharded"])
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), abstract)

    published = publish_to_sampler(params, 0, abstract, shardings)

    assert not published.narrow
    verify(published.params, published.version)


def test_publish_to_sampler_refuses_a_copy_that_was_changed_on_its_way(monkeypatch):
    params, abstract, shardings = sampled_tree(layouts()["sharded"])

    def damaged(leaves, shardings):
        copies = [jax.device_put(leaf, to) for leaf, to in zip(leaves, shardings, strict=True)]
        return copies and [copies[0], copies[1].at[0, 0].add(1)]

    monkeypatch.setattr("jaxrl.weights.exchange.reshard", damaged)

    with pytest.raises(WeightVersionError, match="the sampler's copy of v5:"):
        publish_to_sampler(params, 5, abstract, shardings)

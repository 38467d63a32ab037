"""Copies in memory never share memory with the trainer's weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrl.sharding import make_mesh
from jaxrl.weights.digest import verify
from jaxrl.weights.exchange import copy_to, publish


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

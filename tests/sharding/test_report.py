"""The table of a tree, and its bytes, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.sharding import Rules, bytes_per_device, describe, make_mesh, place, shardings_of

RULES = Rules({"embed": "fsdp", "heads": "tensor"})
AXES = {"layers": [{"query": ("embed", "heads")}], "scale": None}


def _tree() -> dict:
    return {
        "layers": [{"query": jnp.ones((16, 4), jnp.float32)}],
        "scale": jnp.ones((10,), jnp.bfloat16),
    }


def test_bytes_per_device_split_and_replicated_by_hand():
    placed = place(_tree(), make_mesh(fsdp=4, tensor=2), RULES, axes_of=AXES)

    assert bytes_per_device(placed) == 16 * 4 * 4 // 8 + 10 * 2


def test_bytes_per_device_unsplit_leaves_count_whole():
    assert bytes_per_device({"a": np.ones(3, np.float32), "b": jnp.ones((2, 2))}) == 12 + 16
    assert bytes_per_device({}) == 0


def test_bytes_per_device_abstract_tree_equals_the_placed_one():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    shardings = shardings_of(_tree(), mesh, RULES, AXES)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), _tree(), shardings
    )

    assert bytes_per_device(abstract) == bytes_per_device(place(_tree(), mesh, RULES, axes_of=AXES))


def test_describe_lines_carry_path_shape_dtype_spec_and_bytes():
    placed = place(_tree(), make_mesh(fsdp=4, tensor=2), RULES, axes_of=AXES)

    lines = [line.split() for line in describe(placed).splitlines()]

    assert lines[0] == ["path", "shape", "dtype", "spec", "bytes", "bytes/device"]
    assert lines[1] == ["layers/0/query", "16x4", "float32", "('fsdp',", "'tensor')", "256", "32"]
    assert lines[2] == ["scale", "10", "bfloat16", "(None,)", "20", "20"]
    assert lines[3] == ["total", "2", "arrays", "276", "52"]


def test_describe_host_scalar_and_single_device_leaves():
    text = describe({"a": np.float32(1), "b": jnp.ones(2)})

    assert "scalar" in text
    assert "SingleDeviceSharding" in text

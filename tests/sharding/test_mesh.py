"""Meshes come out with the sizes asked for; impossible sizes are errors with the numbers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxrl.sharding import AXES, make_mesh


def test_make_mesh_one_axis_minus_one_takes_the_rest():
    mesh = make_mesh(data=-1, tensor=2)

    assert dict(mesh.shape) == {
        "data": 4,
        "fsdp": 1,
        "context": 1,
        "tensor": 2,
        "expert": 1,
        "expert_tensor": 1,
    }


def test_make_mesh_every_axis_named_uses_every_device_once():
    mesh = make_mesh(data=2, fsdp=2, expert=2)

    assert mesh.axis_names == AXES
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


def test_make_mesh_axis_types_are_auto():
    assert set(make_mesh(data=8).axis_types) == {AxisType.Auto}


def test_make_mesh_given_devices_uses_only_those():
    devices = jax.devices()[5:8]

    mesh = make_mesh(fsdp=-1, devices=devices)

    assert list(mesh.devices.flat) == devices


@pytest.mark.parametrize("axis", AXES)
def test_make_mesh_minus_one_works_on_each_axis(axis):
    assert make_mesh(**{axis: -1}).shape[axis] == 8


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"data": 0}, ["data=0", "positive", "-1"]),
        ({"tensor": -2, "data": -1}, ["tensor=-2", "positive"]),
        ({"data": -1, "fsdp": -1}, ["data and fsdp", "only one"]),
        ({"data": 4, "tensor": 4}, ["data=4 x tensor=4", "product 16", "8 there are"]),
        ({"data": 2, "tensor": 2}, ["data=2 x tensor=2", "product 4", "8 devices", "-1"]),
        ({"data": -1, "tensor": 3}, ["tensor=3", "product 3", "divide the 8", "data=-1"]),
        ({"data": -1, "tensor": 16}, ["tensor=16", "product 16", "divide the 8"]),
        ({}, ["all mesh axes 1", "8 devices"]),
        ({"data": 2.0}, ["data=2.0", "integer"]),
        ({"data": True}, ["data=True", "integer"]),
        ({"data": -1, "devices": []}, ["at least one device"]),
    ],
)
def test_make_mesh_impossible_sizes_error_gives_the_numbers(sizes, words):
    with pytest.raises(ValueError) as caught:
        make_mesh(**sizes)

    for word in words:
        assert word in str(caught.value)


def test_make_mesh_numpy_integers_are_integers():
    assert make_mesh(data=np.int64(8)).shape["data"] == 8


def test_make_mesh_device_that_comes_twice_is_an_error():
    first = jax.devices()[0]

    with pytest.raises(ValueError, match="each must be there once"):
        make_mesh(data=2, devices=[first, first])

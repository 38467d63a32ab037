"""What each process of a run samples, and on which mesh."""

from __future__ import annotations

import dataclasses

import pytest
from planning.planned import small_config

from jaxrl.config import SamplerMeshConfig
from jaxrl.errors import ConfigError
from jaxrl.inference.shares import check_shares, owned_by_each, sampler_sizes
from jaxrl.sharding import AXES

TRAINER = dict(zip(AXES, (2, 4, 2, 2, 4, 1), strict=True))


def sizes_of(asked: dict, owned: int, processes: int, trainer=TRAINER) -> dict:
    config = dataclasses.replace(small_config(), sampler_mesh=SamplerMeshConfig(**asked))
    sizes = sampler_sizes(config, trainer, owned, processes)
    return {axis: size for axis, size in sizes.items() if size > 1}


def test_sampler_sizes_of_one_process_are_the_trainers():
    assert sizes_of({}, 128, 1) == {axis: size for axis, size in TRAINER.items() if size > 1}


@pytest.mark.parametrize(
    ("asked", "owned", "expected"),
    [
        ({}, 4, {"tensor": 2, "expert": 2}),
        ({}, 1, {}),
        ({}, 32, {"tensor": 2, "expert": 4, "fsdp": 4}),
        ({}, 96, {"tensor": 2, "expert": 4, "fsdp": 4, "data": 3}),
        ({"tensor": 4}, 4, {"tensor": 4}),
        ({"tensor": 1}, 4, {"expert": 4}),
        ({"fsdp": 1, "expert": 1}, 8, {"tensor": 2, "data": 4}),
        ({"fsdp": 4}, 4, {"fsdp": 4}),
    ],
)
def test_sampler_sizes_of_several_processes_go_as_far_as_their_devices(asked, owned, expected):
    assert sizes_of(asked, owned, 4) == expected


def test_sampler_sizes_asked_of_one_process_leave_the_rest_to_data():
    trainer = dict.fromkeys(AXES, 1) | {"fsdp": 8}

    assert sizes_of({"tensor": 2, "fsdp": 1}, 8, 1, trainer) == {"tensor": 2, "data": 4}
    assert sizes_of({"tensor": 2}, 8, 1, trainer) == {"tensor": 2, "fsdp": 4}


def test_sampler_sizes_that_do_not_divide_the_devices_are_refused_with_the_numbers():
    message = "sampler_mesh.tensor=3 x sampler_mesh.fsdp=2 must divide the 4 devices"

    with pytest.raises(ConfigError, match=message):
        sizes_of({"tensor": 3, "fsdp": 2}, 4, 2)


@pytest.mark.parametrize(
    ("processes", "sizes", "message"),
    [
        (2, {"data": 3}, r"rollout\.slots=16 must be a multiple of 2 processes x data=3"),
        (1, {"data": 3, "fsdp": 2}, r"slots=16 must be a multiple of data=3 x fsdp=2 of the mesh"),
        (8, {}, r"train\.batch_size=16 must be a multiple of 8 processes x rollout\.group_size=4"),
        (3, None, r"train\.batch_size=16 must be a multiple of 3 processes"),
        (1, {"tensor": 4}, "the mesh that a process samples on: model.n_kv_heads=2 must be divis"),
    ],
)
def test_check_shares_refuses_what_does_not_divide_with_the_numbers(processes, sizes, message):
    config = small_config()

    with pytest.raises(ConfigError, match=message):
        whole = None if sizes is None else dict.fromkeys(AXES, 1) | sizes
        check_shares(config, config.model, whole, processes)


def test_owned_by_each_counts_devices_and_refuses_processes_that_have_more_than_others():
    assert owned_by_each([0, 0, 1, 1]) == 2

    with pytest.raises(ConfigError, match="there are 2 in processes 0, 2; 1 in process 1"):
        owned_by_each([0, 0, 1, 2, 2])

"""Runs of several processes, planned as they sample: each host on its own devices."""

from __future__ import annotations

import dataclasses

import pytest
from planning.planned import small_config

from jaxrl.config import SamplerMeshConfig
from jaxrl.errors import ConfigError
from jaxrl.planning.chips import parse_topology
from jaxrl.planning.layout import make_layout
from jaxrl.planning.memory import plan_memory


@pytest.mark.parametrize(
    ("name", "hosts", "host"),
    [
        ("v5e:1x1", 1, "v5e:1x1"),
        ("v5e:2x4", 1, "v5e:2x4"),
        ("v5e:4x4", 4, "v5e:2x2"),
        ("v5e:16x16", 64, "v5e:2x2"),
        ("v5p:2x2x1", 1, "v5p:2x2x1"),
        ("v5p:4x4x8", 32, "v5p:2x2x1"),
    ],
)
def test_topology_knows_its_hosts(name, hosts, host):
    topology = parse_topology(name)

    assert (topology.hosts, topology.host.name) == (hosts, host)


def test_layout_of_several_processes_samples_with_a_share_of_slots_and_devices():
    config = small_config(mesh={"data": 1, "fsdp": 4, "tensor": 2})

    layout = make_layout(config, 8, processes=4)

    assert layout.sampler_mesh.shape["tensor"] == layout.sampler_mesh.size == 2
    assert layout.engine.slots == 4


def test_layout_of_processes_that_do_not_divide_the_devices_is_refused():
    with pytest.raises(ConfigError, match="8 devices must be a multiple of 3 processes"):
        make_layout(small_config(), 8, processes=3)


def test_plan_counts_a_whole_copy_of_the_weights_in_each_process():
    mesh = {"data": 1, "fsdp": 8}
    one, four = (make_layout(small_config(mesh=mesh), 8, processes=n) for n in (1, 4))

    alone, several = plan_memory(one), plan_memory(four)

    copy = 4 * four.model.n_params
    assert several.resident["weights"] == alone.resident["weights"]
    # Two devices hold the copy; scales of norms are whole on both.
    assert copy / 2 <= several.resident["weights of the sampler"] < 1.01 * copy / 2
    assert alone.resident["weights of the sampler"] < 1.1 * copy / 8


def test_plan_counts_the_samplers_weights_in_the_dtype_of_the_computation():
    wide, slim = (small_config(model={"dtype": dtype}) for dtype in ("float32", "bfloat16"))
    of_wide, of_slim = (plan_memory(make_layout(c, 1)).resident for c in (wide, slim))

    name = "weights of the sampler"
    assert 0.5 * of_wide[name] <= of_slim[name] < 0.51 * of_wide[name]
    assert of_slim["weights"] == of_wide["weights"]


def test_plan_counts_weights_that_are_cast_before_they_travel():
    config = dataclasses.replace(
        small_config(model={"dtype": "bfloat16"}, mesh={"data": 1, "fsdp": 4}),
        sampler_mesh=SamplerMeshConfig(tensor=2, fsdp=1),
    )

    publish = plan_memory(make_layout(config, 4)).programs["publish"]

    assert publish["cast weights"] < publish["new weights"]

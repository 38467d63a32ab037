"""Names of topologies, and what a slice can send."""

from __future__ import annotations

import pytest

from jaxrl.errors import ConfigError
from jaxrl.planning.chips import CHIPS, parse_topology


@pytest.mark.parametrize(
    ("name", "dims", "devices"),
    [
        ("v5e:1x1", (1, 1), 1),
        ("v5e:4x8", (4, 8), 32),
        ("v5e:16x16", (16, 16), 256),
        ("v4:2x2x4", (2, 2, 4), 16),
        ("v5p:4x4x8", (4, 4, 8), 128),
        ("v5p:24x16x16", (24, 16, 16), 6144),
        ("v6e:4x4", (4, 4), 16),
        # Each chip shows itself as two devices.
        ("tpu7x:2x2x2", (2, 2, 2), 16),
    ],
)
def test_parse_topology_known_slice_has_these_sizes(name, dims, devices):
    topology = parse_topology(name)

    assert (topology.dims, topology.n_devices, topology.name) == (dims, devices, name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5x:4x4", "there is no chip 'v5x'; did you mean v5"),
        ("h100:8", "there is no chip 'h100'; there are v4, v5e, v5p, v6e, tpu7x"),
        ("", "there is no chip ''; there are v4, v5e, v5p, v6e, tpu7x"),
        ("v5e", "must be v5e:AxB with 2 sizes, as in v5e:2x2"),
        ("v5e:16", "must be v5e:AxB with 2 sizes"),
        ("v5e:4x4x4", "must be v5e:AxB with 2 sizes"),
        ("v5e:4xfour", "must be v5e:AxB with 2 sizes"),
        ("v5p:4x4", "must be v5p:AxBxC with 3 sizes, as in v5p:2x2x1"),
        ("v5e:32x8", "sizes must be from 1 to those of a pod, 16x16"),
        ("v5p:16x24x24", "sizes must be from 1 to those of a pod, 16x16x24"),
        ("v5e:0x4", "sizes must be from 1 to those of a pod, 16x16"),
        ("v5e:" + 5000 * "9" + "x4", "must be v5e:AxB with 2 sizes"),
        ("v5e:4x\u0663", "must be v5e:AxB with 2 sizes"),
        ("v5e:3x4", "hosts have 2x2 chips, so each size must be a multiple of theirs"),
    ],
)
def test_parse_topology_impossible_name_is_refused_with_what_there_is(name, message):
    with pytest.raises(ConfigError, match=f"topology {name!r}") as error:
        parse_topology(name)

    assert message in str(error.value)


def test_rate_along_counts_both_directions_of_a_ring_only():
    link = CHIPS["v5e"].link_rate
    whole, part = parse_topology("v5e:16x16"), parse_topology("v5e:4x16")

    assert whole.rate_along(frozenset({0})) == 2 * link
    assert part.rate_along(frozenset({0})) == link
    assert part.rate_along(frozenset({0, 1})) == 3 * link
    assert part.rate_along(frozenset()) == 0
    assert parse_topology("v5p:4x4x8").rate_along(frozenset({2})) == 2 * CHIPS["v5p"].link_rate

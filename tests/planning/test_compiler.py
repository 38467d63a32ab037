"""What is read out of compiled programs and of the compiler's messages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxrl.distributed.hlo import Collective
from jaxrl.planning.chips import parse_topology
from jaxrl.planning.compiler import explain, network_traffic

SLICE = parse_topology("v5e:4x16")
DEVICES = [SimpleNamespace(coords=[i % 4, i // 4, 0]) for i in range(64)]
LINK = SLICE.chip.link_rate


def collective(kind, group, floats, trips=1):
    return Collective(kind, None, (group,), ((floats,),), ("f32",), "main", trips)


def test_network_traffic_along_a_line_takes_one_link_and_along_a_ring_two():
    line = collective("all-gather", tuple(range(4)), 4000)
    ring = collective("reduce-scatter", tuple(range(0, 64, 4)), 1000)

    traffic = network_traffic([line, ring], DEVICES, SLICE)

    # Three quarters of the result come from the others; 15 times the result goes around.
    assert traffic["all-gather"].sent_bytes == 12_000
    assert traffic["all-gather"].seconds == pytest.approx(12_000 / LINK)
    assert traffic["reduce-scatter"].sent_bytes == 60_000
    assert traffic["reduce-scatter"].seconds == pytest.approx(60_000 / (2 * LINK))


def test_network_traffic_adds_up_what_is_of_one_kind_as_often_as_it_runs():
    pair = (0, 1)
    both = [collective("all-reduce", pair, 10, trips=3), collective("all-reduce", pair, 20)]

    total = network_traffic(both, DEVICES, SLICE)["all-reduce"]

    # Of a pair each sends half of the array twice.
    assert (total.count, total.sent_bytes) == (4, 3 * 40 + 80)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (24.00G) exceeds available HBM (15.75G).\nSee",
            "it needs 24.00GiB of HBM, the chip has 15.75GiB (",
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 30.10G of 15.75G hbm. Exceeded hbm capacity by 14.35G.\n\nTotal",
            "it needs 30.10GiB of HBM, the chip has 15.75GiB (",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.5M of 16.0M vmem.",
            "it needs 20.5MiB of VMEM, the chip has 16.0MiB (",
        ),
        ("INTERNAL: something else\nwith a second line", "INTERNAL: something else"),
        ("\n\n", "RuntimeError"),
        ("x" * 400, "x" * 300 + "…"),
    ],
)
def test_explain_gives_one_line_with_what_is_needed_and_what_there_is(text, expected):
    got = explain(RuntimeError(text))

    assert got.startswith(expected)
    assert "\n" not in got

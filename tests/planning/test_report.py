"""What the records of plans and compiled programs say."""

from __future__ import annotations

from planning.planned import small_config

from jaxrl.planning.chips import parse_topology
from jaxrl.planning.compiler import Memory, Program
from jaxrl.planning.hlo_costs import Costs
from jaxrl.planning.layout import make_layout
from jaxrl.planning.memory import plan_memory
from jaxrl.planning.programs import work_of
from jaxrl.planning.report import compile_record


def compiled(layout, name: str, temporary: int) -> Program:
    return Program(
        name,
        Memory(0, 0, 0, temporary),
        work_of(layout, name),
        Costs(1.0, 1.0),
        1.0,
        {},
        1,
        1,
        1,
        1,
    )


def test_compile_record_takes_what_was_compiled_and_what_is_planned_of_the_rest():
    layout = make_layout(small_config(mesh={"data": 1, "fsdp": 4}), 4)
    plan, topology = plan_memory(layout), parse_topology("v5e:2x2")
    resident, publish = sum(plan.resident.values()), sum(plan.programs["publish"].values())
    names = ("train", "prefill", "decode")

    little = [compiled(layout, name, 1) for name in names]
    much = [compiled(layout, name, 10 * publish) for name in names]

    peaks = [compile_record(layout, plan, topology, each)["peak_bytes"] for each in (little, much)]
    assert peaks == [resident + publish, resident + 10 * publish]

"""What the records of plans and compiled programs say."""

from __future__ import annotations

import dataclasses

from planning.planned import small_config

from jaxrl.planning.chips import parse_topology
from jaxrl.planning.compiler import Memory, Program
from jaxrl.planning.hlo_costs import Costs
from jaxrl.planning.layout import make_layout
from jaxrl.planning.memory import plan_memory
from jaxrl.planning.programs import work_of
from jaxrl.planning.report import compile_record, compile_text


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


def test_compile_text_shows_times_of_tiny_programs_in_microseconds():
    layout = make_layout(small_config(), 4)
    plan, topology = plan_memory(layout), parse_topology("v5e:2x2")
    times = {"compute_s": 2.0, "memory_s": 0.003, "network_s": 4.5e-6}
    program = dataclasses.replace(compiled(layout, "train", 1), **times)

    text = compile_text(compile_record(layout, plan, topology, [program]))

    assert "compute   2.00 s: " in text
    assert "memory    3.00 ms: " in text
    assert "network   4.50 µs" in text

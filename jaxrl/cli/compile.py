"""`jaxrl compile`: a run through the compiler of a TPU slice that need not exist."""

from __future__ import annotations

import json
from typing import Any

from jaxrl.cli import output
from jaxrl.planning import tpu_environment
from jaxrl.planning.chips import parse_topology


def run(args: Any) -> int:
    """Print what each program costs; returns 0 if all compile and the run fits, else 1."""
    options, config = args.options, args.config
    topology = parse_topology(options.topology)
    tpu_environment.prepare()  # before jax is imported
    from jaxrl.planning.compiler import compile_program, make_slice_layout
    from jaxrl.planning.memory import plan_memory
    from jaxrl.planning.report import compile_record, compile_text

    layout = make_slice_layout(config, topology)
    programs = []
    for name in options.programs:
        if name == "train" and not layout.phase:
            output.report("train: nothing is trained (train.steps=0 and sft.steps=0)\n")
            continue
        output.report(f"compiling {name} for {topology.name}\n")
        programs.append(compile_program(layout, topology, name))
    record = compile_record(layout, plan_memory(layout, kernel=True), topology, programs)
    output.write(f"{json.dumps(record, indent=1)}\n" if options.json else compile_text(record))
    return 0 if record["fits"] else 1

"""`jaxrl debug collectives`: what the programs of a run or a config send between devices."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.cli import output
from jaxrl.cli.plan import devices_of
from jaxrl.config import ExperimentConfig
from jaxrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jaxrl.distributed.hlo import Collective
    from jaxrl.distributed.record import Program

_RECORD = "collectives.json"
_MOST_ARRAYS = 3
_MOST_DEVICES = 1 << 15
"""More than a pod has; so many take minutes already."""


def run(args: Any) -> int:
    """Print the collectives of the programs in schedule order; returns 0."""
    options = args.options
    logs = Path(options.target) / "logs"
    recorded = (logs / _RECORD).is_file() and not args.overrides and not options.compile
    if logs.is_dir() and not (logs / _RECORD).exists():
        output.report(f"{logs / _RECORD} is not there: a run of one process records nothing\n")
    programs = list(_recorded(logs) if recorded else _compiled(args.config, options))
    if options.program:
        names = [program.name for program in programs]
        programs = [program for program in programs if program.name == options.program]
        if not programs:
            raise DataError(f"--program={options.program!r} must be one of {sorted(set(names))}")
    if options.json:
        text = json.dumps([_record(program) for program in programs], indent=1) + "\n"
    else:
        text = "\n".join(_table(program, args.config) for program in programs)
    output.write(text)
    return 0


def _recorded(logs: Path) -> tuple[Program, ...]:
    from jaxrl.distributed.record import read_programs

    return read_programs(logs)


def _compiled(config: ExperimentConfig, options: Any) -> Iterator[Program]:
    """The programs of `config`, compiled for as many CPU devices as its mesh has."""
    count = options.devices or devices_of(config, "--devices")
    if count > _MOST_DEVICES:
        raise ConfigError(f"programs are compiled for at most {_MOST_DEVICES} devices, not {count}")
    import jax

    from jaxrl.distributed.hlo import collectives_in
    from jaxrl.distributed.record import Program
    from jaxrl.planning.layout import make_layout
    from jaxrl.planning.programs import NAMES, lower

    # Where JAX runs already (a notebook) it refuses; its devices may do.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(f"the mesh has {count} devices, but JAX runs with {len(devices)} already")
    layout = make_layout(config, count, devices[:count])
    if options.program and options.program not in NAMES:
        raise DataError(f"--program={options.program!r} must be one of {sorted(NAMES)}")
    for name in [options.program] if options.program else NAMES:
        if name == "train" and not layout.phase:
            output.report("train: nothing is trained (train.steps=0 and sft.steps=0)\n")
            continue
        output.report(f"compiling {name} for {count} CPU devices\n")
        yield Program(name, (), collectives_in(lower(layout, name).compile().as_text()))


def _table(program: Program, config: ExperimentConfig) -> str:
    """One program: a line of sums, then a line for each collective."""
    from jaxrl.distributed import groups
    from jaxrl.distributed.order import groups_text

    count = sum(one.trips for one in program.collectives)
    sent = sum(one.trips * one.sent_bytes for one in program.collectives)
    head = f"{program.name}: {count} collectives in a run, {sent:,} bytes sent by each device"
    if program.inputs:
        head += f"\ninputs: {len(program.inputs)}, the last {program.inputs[-1]}"
    sizes = _sizes(program, config)
    rows = [("", "times", "kind", "reduction", "bytes", "along", "result on a device")]
    for number, one in enumerate(program.collectives):
        along = groups.axes_of(one.groups, sizes)
        if not along:
            # A mesh axis of one device: nothing is sent.
            along = "none" if along == "" else groups_text(one)
        what = (str(number), str(one.trips), one.kind, one.reduction or "", f"{one.bytes:,}")
        rows.append((*what, along, _results(one)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.rjust(width) if column in (0, 1, 4) else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([head, *(lines if program.collectives else [])]) + "\n"


def _sizes(program: Program, config: ExperimentConfig) -> dict[str, int]:
    """Axis -> size of the mesh; one that takes the rest by the devices that the program names."""
    from jaxrl.sharding import AXES

    sizes = config.mesh.sizes()
    ids = [device for one in program.collectives for group in one.groups for device in group]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    rest = (max(ids, default=0) + 1) // fixed
    return {axis: rest if (size := sizes[axis]) == -1 else size for axis in AXES}


def _results(one: Collective) -> str:
    """The arrays in short; many by the first ones."""
    from jaxrl.distributed.order import arrays_text

    if len(one.shapes) <= _MOST_ARRAYS:
        return arrays_text(one)
    first = dataclasses.replace(
        one, shapes=one.shapes[:_MOST_ARRAYS], dtypes=one.dtypes[:_MOST_ARRAYS]
    )
    return f"{len(one.shapes)} arrays: {arrays_text(first)}, ..."


def _record(program: Program) -> dict[str, Any]:
    return {
        "program": program.name,
        "inputs": program.inputs,
        "collectives": [
            {
                "kind": one.kind,
                "reduction": one.reduction,
                "groups": one.groups,
                "shapes": one.shapes,
                "dtypes": one.dtypes,
                "times": one.trips,
                "bytes": one.bytes,
                "sent_bytes": one.sent_bytes,
            }
            for one in program.collectives
        ],
    }

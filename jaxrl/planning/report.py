"""Plans and compiled programs as records for JSON, and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jaxrl.planning.chips import GIB, Topology
from jaxrl.planning.compiler import Program
from jaxrl.planning.layout import Layout
from jaxrl.planning.memory import MemoryPlan
from jaxrl.planning.programs import active_params


def plan_record(layout: Layout, plan: MemoryPlan, limit: int | None, place: str) -> dict[str, Any]:
    """The plan as a JSON object: bytes per device. "fits" is None where there is no `limit`."""
    return {
        **_head(layout, place),
        "resident_bytes": dict(plan.resident),
        "program_bytes": {name: dict(parts) for name, parts in plan.programs.items()},
        "peak_bytes": plan.peak,
        "limit_bytes": limit,
        "fits": None if limit is None else plan.peak <= limit,
    }


def compile_record(
    layout: Layout, plan: MemoryPlan, topology: Topology, programs: Sequence[Program]
) -> dict[str, Any]:
    """Compiled programs as a JSON object. "peak_bytes": what a run keeps on a device all the time,
    and the most that anything needs besides: one of these programs, or what is planned of the
    others."""
    resident = sum(plan.resident.values())
    besides = {name: sum(parts.values()) for name, parts in plan.programs.items()} | {
        program.name: program.memory.temporary + program.memory.outputs - program.memory.aliased
        for program in programs
    }
    peak = resident + max(besides.values(), default=0)
    limit = topology.chip.hbm_bytes
    return {
        **_head(layout, topology.name),
        "limit_bytes": limit,
        "resident_bytes": resident,
        "peak_bytes": peak,
        "fits": peak <= limit,
        "programs": [_program(layout, topology, program) for program in programs],
    }


def plan_text(record: Mapping[str, Any]) -> str:
    """A plan for people."""
    rows = [(name, size, 1) for name, size in record["resident_bytes"].items()]
    rows.append(("resident", sum(record["resident_bytes"].values()), 0))
    largest = max(record["program_bytes"].items(), key=lambda item: sum(item[1].values()))[0]
    for name, parts in record["program_bytes"].items():
        rows.append((f"{name}, while it runs", sum(parts.values()), 0))
        rows += [(part, size, 1) for part, size in parts.items()]
    rows.append((f"peak: resident and {largest}", record["peak_bytes"], 0))
    lines = [_title(record), "", "memory per device"]
    lines += [f"  {'  ' * depth + name:<40}{_size(size):>12}" for name, size, depth in rows]
    return "\n".join([*lines, "", _verdict(record)]) + "\n"


def compile_text(record: Mapping[str, Any]) -> str:
    """Compiled programs for people."""
    lines = [_title(record)]
    for program in record["programs"]:
        lines += ["", *_program_lines(program, record["limit_bytes"])]
    resident, peak = _size(record["resident_bytes"]), _size(record["peak_bytes"])
    lines += ["", f"a run keeps {resident} on a device, and needs {peak} at its peak"]
    return "\n".join([*lines, _verdict(record)]) + "\n"


def _head(layout: Layout, place: str) -> dict[str, Any]:
    return {
        "name": layout.config.name,
        "place": place,
        "devices": layout.mesh.size,
        "mesh": _axes(layout.mesh),
        "processes": layout.processes,
        "sampler_mesh": _axes(layout.sampler_mesh),
        "parameters": layout.model.n_params,
        "active_parameters": active_params(layout),
        "rows": layout.rows if layout.phase else 0,
        "row_length": layout.config.row_length,
    }


def _program(layout: Layout, topology: Topology, program: Program) -> dict[str, Any]:
    devices = layout.mesh_of(program.name).size
    flops, peak = program.costs.flops * devices, topology.chip.peak_flops * devices
    return {
        "name": program.name,
        "devices": devices,
        "work": program.work.note,
        "tokens": program.work.tokens,
        "steps": program.work.steps,
        "memory_bytes": {
            "arguments": program.memory.arguments,
            "outputs": program.memory.outputs,
            "aliased": program.memory.aliased,
            "temporary": program.memory.temporary,
            "total": program.memory.total,
        },
        "flops": flops,
        "model_flops": program.work.model_flops,
        "flops_over_model": flops / program.work.model_flops,
        "flops_per_device_loops_once": program.counted_flops,
        "bytes_per_device": program.costs.bytes,
        "collectives": {
            kind: {"count": t.count, "sent_bytes": t.sent_bytes, "seconds": t.seconds}
            for kind, t in sorted(program.traffic.items())
        },
        "compute_s": program.compute_s,
        "memory_s": program.memory_s,
        "network_s": program.network_s,
        "fastest_s": program.fastest_s,
        "slowest_s": program.slowest_s,
        "utilisation_at_most": program.work.model_flops / peak / program.fastest_s,
        "utilisation_without_overlap": program.work.model_flops / peak / program.slowest_s,
        "compile_s": program.compile_s,
    }


def _title(record: Mapping[str, Any]) -> str:
    mesh = axes_text(record["mesh"])
    if record["sampler_mesh"] != record["mesh"]:
        each = f" in each of {record['processes']} processes" if record["processes"] > 1 else ""
        mesh += f"; sampling with {axes_text(record['sampler_mesh'])}{each}"
    total, active = record["parameters"], record["active_parameters"]
    weights = f"{_count(total)} weights"
    if active < 0.7 * total:
        weights += f", {_count(active)} of them for each token"
    batch = f", {record['rows']} rows of {record['row_length']} tokens" if record["rows"] else ""
    return f"{record['name']} on {record['place']} ({mesh}): {weights}{batch}"


def axes_text(axes: Mapping[str, int]) -> str:
    """Axis -> size as text."""
    return " ".join(f"{name}={size}" for name, size in axes.items()) or "one device"


def _axes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    return {name: size for name, size in mesh.shape.items() if size > 1}


def _verdict(record: Mapping[str, Any]) -> str:
    peak, limit = record["peak_bytes"], record["limit_bytes"]
    if limit is None:
        return f"{_size(peak)}; --topology or --hbm-gb says how much there is"
    share = f"{_size(peak)} of {_size(limit)} ({100 * peak / limit:.0f} %)"
    return f"fits: {share}" if record["fits"] else f"DOES NOT FIT: {share}"


def _program_lines(program: Mapping[str, Any], limit: int) -> Iterable[str]:
    memory = {name: _size(size) for name, size in program["memory_bytes"].items()}
    yield f"{program['name']}: {program['work']} (compiled in {program['compile_s']:.0f} s)"
    yield (
        f"  size      {memory['total']} of {_size(limit)}: arguments {memory['arguments']}, "
        f"temporary {memory['temporary']}, outputs {memory['outputs']}, of which "
        f"{memory['aliased']} in place of arguments"
    )
    yield (
        f"  compute   {_seconds(program['compute_s'])}: {program['flops']:.3g} operations on "
        f"{program['devices']} devices, {program['flops_over_model']:.2f} x the "
        f"{program['model_flops']:.3g} of the weights"
    )
    yield f"  memory    {_seconds(program['memory_s'])}: {program['bytes_per_device']:.3g} bytes"
    yield f"  network   {_seconds(program['network_s'])}"
    for kind, traffic in program["collectives"].items():
        yield (
            f"    {kind:<20}{traffic['count']:>6} x {_seconds(traffic['seconds'])}: "
            f"{traffic['sent_bytes']:.3g} bytes sent"
        )
    yield (
        f"  estimate  {_seconds(program['fastest_s'])} if all overlaps (utilisation "
        f"{100 * program['utilisation_at_most']:.0f} %), {_seconds(program['slowest_s'])} if "
        f"nothing does ({100 * program['utilisation_without_overlap']:.0f} %)"
    )


def _count(number: int) -> str:
    for unit, name in ((1e9, " billion"), (1e6, " million")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:,}"


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / 2**10:.2f} KiB"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.2f} µs"

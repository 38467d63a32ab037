"""Compiles the programs of a config for a slice that need not exist, and says what they cost."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib
from jax.experimental import topologies

from jaxrl.config import ExperimentConfig
from jaxrl.distributed.hlo import Collective, collectives_in
from jaxrl.errors import CompileError, ConfigError
from jaxrl.planning.chips import GIB, Topology
from jaxrl.planning.hlo_costs import Costs, costs_of, in_unknown_loops, not_taken
from jaxrl.planning.layout import Layout, make_layout
from jaxrl.planning.programs import Work, lower, work_of
from jaxrl.planning.tpu_environment import INSTALL

_TOO_LARGE = re.compile(
    r"\(?([\d.]+[KMGT])\)? (?:exceeds available HBM \(|of )([\d.]+[KMGT])", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device: arguments, outputs, those of both that share memory, the rest."""

    arguments: int
    outputs: int
    aliased: int
    temporary: int

    @property
    def total(self) -> int:
        """What the program needs at once, at most."""
        return self.arguments + self.outputs - self.aliased + self.temporary


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What all collectives of one kind do in one run: how many there are, bytes that one device
    sends, and seconds that the links need for them."""

    count: int
    sent_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its memory, its work, and the seconds that peak, memory bandwidth and
    links need at least. `counted_flops` is what the compiler reports, loops counted once."""

    name: str
    memory: Memory
    work: Work
    costs: Costs
    counted_flops: float
    traffic: Mapping[str, Traffic]
    compute_s: float
    memory_s: float
    network_s: float
    compile_s: float

    @property
    def fastest_s(self) -> float:
        """Seconds of a run in which everything overlaps."""
        return max(self.compute_s, self.memory_s, self.network_s)

    @property
    def slowest_s(self) -> float:
        """Seconds of a run in which nothing overlaps, each part at its full rate."""
        return self.compute_s + self.memory_s + self.network_s


def slice_devices(topology: Topology) -> list[jax.Device]:
    """The devices of a slice, as the TPU compiler describes them. Raises `ConfigError`."""
    variant = {"chip_config_name": topology.chip.variant} if topology.chip.variant else {}
    try:
        found = topologies.get_topology_desc(topology.name, platform="tpu", **variant)
    except Exception as error:  # the library's own error types are not public
        raise ConfigError(f"topology {topology.name!r}: {_first_line(error)}") from None
    return list(found.devices)


def make_slice_layout(config: ExperimentConfig, topology: Topology) -> Layout:
    """The layout of a run on a slice, one process on each host. Raises `ConfigError`."""
    return make_layout(
        config,
        topology.n_devices,
        slice_devices(topology),
        processes=topology.hosts,
        sampler_devices=slice_devices(topology.host),
    )


def compile_program(layout: Layout, topology: Topology, name: str) -> Program:
    """Compile the program `name` of a layout whose meshes are those of `make_slice_layout`.

    Raises `CompileError`, with the numbers, for one that does not fit the chip.
    """
    # Sampling is the business of one host.
    topology = topology if name == "train" else topology.host
    began = time.monotonic()
    try:
        compiled = lower(layout, name).compile()
    except jax.errors.JaxRuntimeError as error:
        raise CompileError(
            f"{name} does not compile for {topology.name}: {explain(error)}"
        ) from None
    seconds = time.monotonic() - began
    text, memory = _text(compiled, name, topology), compiled.memory_analysis()
    work, chip = work_of(layout, name), topology.chip
    costs = costs_of(text, unknown_trips=work.steps)
    repeated = in_unknown_loops(text) if work.steps > 1 else ()
    rare = not_taken(text)
    collectives = [
        dataclasses.replace(one, trips=one.trips * work.steps)
        if one.computation in repeated
        else one
        for one in collectives_in(text)
        if one.computation not in rare
    ]
    traffic = network_traffic(collectives, list(layout.mesh_of(name).devices.flat), topology)
    return Program(
        name=name,
        memory=Memory(
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
        ),
        work=work,
        costs=costs,
        counted_flops=float(_analysis(compiled).get("flops", 0.0)),
        traffic=traffic,
        compute_s=costs.flops / chip.peak_flops,
        memory_s=costs.bytes / chip.hbm_rate,
        network_s=sum(kind.seconds for kind in traffic.values()),
        compile_s=seconds,
    )


def network_traffic(
    collectives: Sequence[Collective], devices: Sequence[Any], topology: Topology
) -> dict[str, Traffic]:
    """Kind of collective -> its traffic. A collective uses the links of the dimensions along which
    its groups lie, in both directions where these are rings."""
    places = [tuple(device.coords) for device in devices]
    total: dict[str, Traffic] = {}
    for one in collectives:
        sent = one.sent_bytes * one.trips
        dims = frozenset(
            dim
            for dim in range(len(topology.dims))
            if any(len({places[i][dim] for i in group}) > 1 for group in one.groups)
        )
        # Within a chip: faster than a link, by how much is not published.
        rate = topology.rate_along(dims) or 2 * topology.chip.link_rate
        old = total.get(one.kind, Traffic(0, 0, 0.0))
        total[one.kind] = Traffic(
            old.count + one.trips, old.sent_bytes + sent, old.seconds + sent / rate
        )
    return total


def explain(error: Exception) -> str:
    """The compiler's message in one line, with what is needed and what there is."""
    text = str(error)
    found = _TOO_LARGE.search(text)
    place = "VMEM" if "vmem" in text.lower() else "HBM"
    if "RESOURCE_EXHAUSTED" in text and found:
        needed, there = found.groups()
        return f"it needs {needed}iB of {place}, the chip has {there}iB ({_first_line(error)})"
    return _first_line(error)


def _text(compiled: Any, name: str, topology: Topology) -> str:
    """The compiled program as text. Raises `CompileError` where jaxlib cannot read it."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        temporary = compiled.memory_analysis().temp_size_in_bytes / GIB
        raise CompileError(
            f"{name} compiles for {topology.name} ({temporary:.2f} GiB of temporary values), but "
            f"jaxlib {jaxlib.__version__} cannot read the program of this libtpu: install the "
            f"version that goes with it, {INSTALL} ({_first_line(error)})"
        ) from None


def _first_line(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return (line if len(line) <= 300 else f"{line[:300]}…") or type(error).__name__


def _analysis(compiled: Any) -> Mapping[str, float]:
    found = compiled.cost_analysis() or {}
    return found[0] if isinstance(found, list) else found

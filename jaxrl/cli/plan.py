"""`jaxrl plan`: the memory of a run per device, before anything is allocated."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from jaxrl.cli import output
from jaxrl.config import ExperimentConfig
from jaxrl.errors import ConfigError
from jaxrl.planning.chips import GIB, Topology, parse_topology


def run(args: Any) -> int:
    """Print the plan; returns 0 if it fits, or if there is no limit, and 1 if it does not."""
    options, config = args.options, args.config
    topology = parse_topology(options.topology) if options.topology else None
    n_devices = topology.n_devices if topology else options.devices or devices_of(config)
    limit = topology.chip.hbm_bytes if topology else None
    if options.hbm_gb is not None:
        limit = int(options.hbm_gb * GIB)
    # Shapes only: no chip that is here is woken up.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxrl.planning.layout import make_layout
    from jaxrl.planning.memory import plan_memory
    from jaxrl.planning.report import plan_record, plan_text

    processes = options.processes or (topology.hosts if topology else 1)
    layout = make_layout(config, n_devices, processes=processes)
    plan = plan_memory(layout, kernel=topology is not None)
    record = plan_record(layout, plan, limit, _place(topology, n_devices))
    output.write(f"{json.dumps(record, indent=1)}\n" if options.json else plan_text(record))
    return 0 if record["fits"] in (True, None) else 1


def devices_of(config: ExperimentConfig, flags: str = "--topology or --devices") -> int:
    """The product of the mesh axes. Raises `ConfigError`, which names `flags`, if one is open."""
    sizes = config.mesh.sizes()
    open_axis = next((name for name, size in sizes.items() if size == -1), None)
    if open_axis:
        raise ConfigError(
            f"mesh.{open_axis}=-1 takes the rest of the devices: say how many there are with "
            f"{flags}"
        )
    return math.prod(sizes.values())


def _place(topology: Topology | None, n_devices: int) -> str:
    return topology.name if topology else f"{n_devices} devices"

"""The flags of the commands that take a config: train, plan, compile, debug. Free of jax."""

from __future__ import annotations

import os
from typing import Any, Literal

from jaxrl.config import rules
from jaxrl.config.schema import common, required, section
from jaxrl.errors import ConfigError

PROGRAMS = ("train", "prefill", "decode")
"""What `jaxrl compile` can compile."""


def _config() -> Any:
    return required("Python file with get_config(), or the config.json of a run")


def _topology(tier: Any, *default: str, more: str = "") -> Any:
    return tier(*default, f"slice, as in v5e:4x8, v5p:4x4x8 or v6e:16x16{more}")


@section("--")
class TrainOptions:
    """Flags of `jaxrl train`."""

    config: str = _config()
    coordinator: str = common(
        "",
        "host:port of process 0, where several processes meet; empty: as the cluster says (TPU "
        "pod, Slurm, Open MPI), or one process",
    )
    processes: int = common(
        0, "how many processes train together", rules.at_least(0, "0: as the cluster says, or one")
    )
    process: int = common(
        -1, "which of them this is, from 0", rules.at_least(-1, "-1: as the cluster says")
    )
    join_timeout_s: float = common(
        300.0, "longest wait for the other processes at the start, in seconds", rules.seconds()
    )
    hang_report_s: float = common(
        120.0, "seconds without progress until a report says who waits for whom", rules.seconds()
    )
    hang_exit_s: float = common(
        900.0, "seconds without progress until all processes end with an error", rules.seconds()
    )

    def check(self) -> None:
        """The three that name a process belong together."""
        given = (bool(self.coordinator), self.processes > 0, self.process >= 0)
        if any(given) and not all(given):
            raise ConfigError(
                f"--coordinator={self.coordinator} --processes={self.processes} "
                f"--process={self.process} belong together: set all three, or none in a cluster"
            )
        if all(given) and self.process >= self.processes:
            raise ConfigError(
                f"--process={self.process} must be below --processes={self.processes}"
            )


@section("--")
class PlanOptions:
    """Flags of `jaxrl plan`."""

    config: str = _config()
    topology: str = _topology(common, "", more="; empty: what --devices says")
    devices: int | None = common(
        None,
        "number of devices; none for that of --topology, or the product of the config's mesh",
        rules.at_least(1),
    )
    processes: int = common(
        0,
        "processes of the run, which sample on an equal part of the devices each",
        rules.at_least(0, "0: one on each host of --topology, else one"),
    )
    hbm_gb: float | None = common(
        None,
        "memory of a device in GiB; none for that of --topology's chip, or no limit",
        rules.within(0.001, 1048576),
    )
    json: bool = common(False, "print one JSON object")

    def check(self) -> None:
        """A slice knows its devices."""
        if self.topology and self.devices is not None:
            raise ConfigError(f"--devices={self.devices} cannot go with --topology={self.topology}")


@section("--")
class CompileOptions:
    """Flags of `jaxrl compile`."""

    config: str = _config()
    topology: str = _topology(required)
    programs: tuple[str, ...] = common(
        PROGRAMS, "what is compiled, one after the other", rules.among(PROGRAMS)
    )
    json: bool = common(False, "print one JSON object")

    def check(self) -> None:
        """Something is compiled."""
        if not self.programs:
            raise ConfigError(f"--programs is empty: it must name some of {', '.join(PROGRAMS)}")


@section("--")
class DebugOptions:
    """Flags of `jaxrl debug`, what is to be shown, and of what."""

    what: Literal["collectives"] = required("what to show")
    target: str = required(
        "output folder of a run, or a config file as of train --config", rules.non_empty()
    )
    program: str = common("", "one program, as in train, prefill or decode; empty: all")
    devices: int | None = common(
        None, "number of devices; none for the product of the config's mesh", rules.at_least(1)
    )
    compile: bool = common(
        False, "compile the programs of a run instead of reading what it recorded"
    )
    json: bool = common(False, "print one JSON array")

    @property
    def config(self) -> str:
        """The config file of the target."""
        folder = os.path.isdir(self.target)
        return os.path.join(self.target, "config.json") if folder else self.target

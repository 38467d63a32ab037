"""Process groups, made explicitly from the axes of a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl.distributed.sides import name_processes
from jaxrl.errors import DistributedError


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes, and their devices, that differ only in their coordinates along `axes`.

    `processes` are in order of their numbers, `process` is this one. `rank` and `size` count
    processes, not devices.
    """

    axes: tuple[str, ...]
    processes: tuple[int, ...]
    devices: tuple[Any, ...]
    process: int

    @property
    def rank(self) -> int:
        """Position of this process in the group."""
        return self.processes.index(self.process)

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.processes)

    @property
    def name(self) -> str:
        """What tells it from other groups: "data of processes 0, 2"."""
        return f"{','.join(self.axes)} of {name_processes(self.processes)}"


def device_groups(mesh: Mesh, axes: str | tuple[str, ...]) -> tuple[tuple[Any, ...], ...]:
    """The devices of `mesh` in groups that differ only along `axes`, each in the order of `axes`.

    Raises `ValueError` for an axis that the mesh does not have, or that is named twice.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"axes={names} must be distinct axes of the mesh, {mesh.axis_names}")
    along = [mesh.axis_names.index(name) for name in names]
    across = [axis for axis in range(mesh.devices.ndim) if axis not in along]
    grid = np.transpose(mesh.devices, across + along)
    rows = grid.reshape(-1, math.prod(mesh.devices.shape[axis] for axis in along))
    return tuple(tuple(row) for row in rows)


def axes_of(groups: Sequence[Sequence[int]], sizes: Mapping[str, int]) -> str | None:
    """The axes of a mesh along which the devices of each of `groups` differ: "fsdp, tensor".

    `sizes` is axis -> size, in the order of the mesh; ids are positions in `mesh.devices.flat`.
    None if there are ids that the mesh does not have.
    """
    coordinates = np.asarray(list(np.ndindex(*sizes.values())))
    if any(not 0 <= device < len(coordinates) for group in groups for device in group):
        return None
    differ = np.zeros(len(sizes), bool)
    for group in groups:
        places = coordinates[list(group)]
        differ |= (places != places[:1]).any(0)
    return ", ".join(name for name, used in zip(sizes, differ, strict=True) if used)


def process_group(mesh: Mesh, axes: str | tuple[str, ...], process: int) -> Group:
    """The group along `axes` that `process` belongs to.

    Raises `DistributedError` if its devices lie in groups of different processes: then there is no
    one group, and the mesh should be laid out so that the other axes stay within a process.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    mine = [row for row in device_groups(mesh, names) if any(_owner(d) == process for d in row)]
    if not mine:
        raise DistributedError(f"process {process} has no device in the mesh {dict(mesh.shape)}")
    members = {tuple(sorted({_owner(device) for device in row})) for row in mine}
    if len(members) > 1:
        told = " and ".join(name_processes(each) for each in sorted(members))
        raise DistributedError(
            f"along {', '.join(names)}, devices of process {process} lie in groups of {told}: a "
            "process needs one group"
        )
    devices = tuple(device for row in mine for device in row)
    return Group(names, members.pop(), devices, process)


def _owner(device: Any) -> int:
    return device.process_index

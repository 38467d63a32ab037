"""Construction of device meshes from the sizes of their axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "context", "tensor", "expert", "expert_tensor")
"""The mesh axes, from the slowest network to the fastest."""


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with all six axes of `AXES`, whose sizes multiply to the number of devices.

    One size may be -1: it becomes what the others leave. `devices` are all of `jax.devices()`
    unless given; devices of a TPU topology are laid out along its physical links. Axis types are
    Auto: the compiler derives the sharding of intermediates (`with_sharding_constraint` guides it).

    Raises `ValueError`, with the numbers, for a size that is not a positive integer or -1, a
    second -1, sizes that do not multiply to the number of devices, and a device that comes twice.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = dict(zip(AXES, (data, fsdp, context, tensor, expert, expert_tensor), strict=True))
    shape = resolve_sizes(sizes, len(devices))
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices={devices}: each must be there once")
    grid = mesh_utils.create_device_mesh(
        shape, np.asarray(devices, dtype=object), allow_split_physical_axes=True
    )
    # Auto is asked for by name: the default of jax.make_mesh is Explicit.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def process_meshes(**sizes: int) -> tuple[Mesh, ...]:
    """One mesh of those `sizes` (as for `make_mesh`) for each process, over its own devices.

    Every process gets the same list. Raises `ValueError` as `make_mesh` does.
    """
    owned: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        owned.setdefault(device.process_index, []).append(device)
    return tuple(make_mesh(**sizes, devices=owned[process]) for process in sorted(owned))


def resolve_sizes(sizes: Mapping[str, int], n_devices: int) -> tuple[int, ...]:
    """Axis sizes with a -1 replaced, checked against the number of devices as in `make_mesh`."""
    if n_devices == 0:
        raise ValueError("devices=[]: a mesh needs at least one device")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise ValueError(f"mesh axis {name}={size!r} must be an integer")
        if size < 1 and size != -1:
            raise ValueError(f"mesh axis {name}={size} must be positive, or -1 for the rest")
    wild = [name for name, size in sizes.items() if size == -1]
    if len(wild) > 1:
        raise ValueError(f"mesh axes {' and '.join(wild)} are -1: only one may take the rest")
    product = math.prod(size for size in sizes.values() if size != -1)
    written = " x ".join(f"{name}={size}" for name, size in sizes.items() if size not in (1, -1))
    written = f"{written} (product {product})" if written else "all mesh axes 1"
    if wild and n_devices % product:
        raise ValueError(
            f"{written} must divide the {n_devices} devices, because {wild[0]}=-1 takes the rest"
        )
    if not wild and product > n_devices:
        raise ValueError(f"{written}: more devices than the {n_devices} there are")
    if not wild and product < n_devices:
        raise ValueError(
            f"{written} must multiply to the {n_devices} devices: set one axis to -1, "
            f"or pass devices= with {product} of them"
        )
    return tuple(n_devices // product if size == -1 else int(size) for size in sizes.values())

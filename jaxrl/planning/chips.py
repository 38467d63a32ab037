"""TPU chips and slices: what their makers publish, and the names of topologies. Free of jax.

Sources: the pages "TPU v4", "v5e", "v5p", "v6e" and "TPU7x" of Google Cloud's documentation (system
architecture: memory, bandwidth, peak of bfloat16, interconnect). A page that gives the interconnect
of a chip in both directions is divided by 2 and by the chip's ports. What the compiler leaves to
programs of the memory was read from its own out-of-memory messages (libtpu 0.0.50).
"""

from __future__ import annotations

import dataclasses
import math
import re

from jaxrl.config import kinds
from jaxrl.errors import ConfigError

GIB = 2**30
_NAME = re.compile(r"([0-9]{1,9})x([0-9]{1,9})(?:x([0-9]{1,9}))?")


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of chip, per device (a chip shows itself as one device or as two).

    `hbm_bytes`: what programs may use of its memory; `peak_flops`: bfloat16, per second;
    `hbm_rate`: bytes per second; `link_rate`: bytes per second of one link in one direction.
    `largest` is the size of a pod, `host` the chips of each host of a slice that has several,
    `alone` the most chips of a single one. A dimension of `ring` chips or a multiple of them closes
    to a ring. `variant` is what the compiler calls its two cores working as one device, where it
    has to be asked for that.
    """

    name: str
    hbm_bytes: int
    peak_flops: float
    hbm_rate: float
    link_rate: float
    largest: tuple[int, ...]
    host: tuple[int, ...]
    ring: int
    devices: int = 1
    variant: str = ""
    alone: tuple[int, ...] = ()


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "v4",
            int(30.75 * GIB),
            275e12,
            1228e9,
            50e9,
            (16, 16, 16),
            (2, 2, 1),
            4,
            variant="megacore",
        ),
        Chip("v5e", int(15.75 * GIB), 197e12, 819e9, 50e9, (16, 16), (2, 2), 16, alone=(2, 4)),
        Chip("v5p", int(95.73 * GIB), 459e12, 2765e9, 100e9, (16, 16, 24), (2, 2, 1), 4),
        Chip("v6e", int(31.24 * GIB), 918e12, 1638e9, 100e9, (16, 16), (2, 2), 16, alone=(2, 4)),
        # One device is one of the two cores of a chip.
        Chip("tpu7x", int(94.74 * GIB), 1153.5e12, 3690e9, 100e9, (16, 16, 36), (2, 2, 1), 4, 2),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: `dims` chips of one kind along the dimensions of its network."""

    chip: Chip
    dims: tuple[int, ...]

    @property
    def name(self) -> str:
        """As the compiler spells it: "v5e:16x16"."""
        return f"{self.chip.name}:{'x'.join(map(str, self.dims))}"

    @property
    def n_devices(self) -> int:
        """Devices of the slice."""
        return math.prod(self.dims) * self.chip.devices

    @property
    def hosts(self) -> int:
        """Hosts of the slice; each runs one process."""
        if math.prod(self.dims) <= math.prod(self.chip.alone or self.chip.host):
            return 1
        return math.prod(self.dims) // math.prod(self.chip.host)

    @property
    def host(self) -> Topology:
        """The chips of one host, as a slice."""
        return self if self.hosts == 1 else Topology(self.chip, self.chip.host)

    def rate_along(self, dims: frozenset[int]) -> float:
        """Bytes per second that a device sends at most when it talks along these dimensions: one
        link for each, two where the dimension is a ring."""
        rings = [self.dims[dim] > 2 and self.dims[dim] % self.chip.ring == 0 for dim in dims]
        return self.chip.link_rate * sum(1 + ring for ring in rings)


def parse_topology(name: str) -> Topology:
    """ "v5e:4x8" -> the slice. Raises `ConfigError` with what there is."""
    kind, colon, sizes = name.partition(":")
    if kind not in CHIPS:
        hint = kinds.did_you_mean(kind, CHIPS) or f"; there are {', '.join(CHIPS)}"
        raise ConfigError(f"topology {name!r}: there is no chip {kind!r}{hint}")
    chip = CHIPS[kind]
    match = _NAME.fullmatch(sizes)
    dims = tuple(int(size) for size in match.groups() if size) if match else ()
    example = f"{kind}:{'x'.join(map(str, chip.host))}"
    if not colon or len(dims) != len(chip.largest):
        raise ConfigError(
            f"topology {name!r} must be {kind}:{'x'.join('ABC'[: len(chip.largest)])} with "
            f"{len(chip.largest)} sizes, as in {example}"
        )
    pod = "x".join(map(str, chip.largest))
    # A pod may be used in any orientation.
    fits = all(a <= b for a, b in zip(sorted(dims), sorted(chip.largest), strict=True))
    if not fits or 0 in dims:
        raise ConfigError(f"topology {name!r}: sizes must be from 1 to those of a pod, {pod}")
    whole = all(dim % part == 0 for dim, part in zip(dims, chip.host, strict=True))
    if not whole and math.prod(dims) > 1:
        host = "x".join(map(str, chip.host))
        raise ConfigError(
            f"topology {name!r}: hosts have {host} chips, so each size must be a multiple of theirs"
        )
    return Topology(chip, dims)

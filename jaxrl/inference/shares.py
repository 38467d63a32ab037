"""What each process of a run samples, and on which mesh of its own devices."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping

from jaxrl.config import ExperimentConfig, ModelConfig
from jaxrl.config.schema import demand
from jaxrl.distributed.sides import sides_of
from jaxrl.errors import ConfigError
from jaxrl.models.check import check_mesh
from jaxrl.sharding import AXES, DEFAULT_RULES

_INNER = ("tensor", "expert", "expert_tensor", "fsdp")  # in the order in which they take devices


def owned_by_each(owners: Iterable[int]) -> int:
    """How many devices each process has; `owners` are the processes of all devices.

    Raises `ConfigError`, with the numbers, if some have more than others.
    """
    counts = collections.Counter(owners)
    if len(set(counts.values())) > 1:
        raise ConfigError(
            "processes that sample must have equally many devices, but there are "
            f"{sides_of(counts)}"
        )
    return next(iter(counts.values()))


def sampler_sizes(
    config: ExperimentConfig, shape: Mapping[str, int], owned: int, processes: int
) -> dict[str, int]:
    """Sizes of the axes of the mesh that each of `processes` samples on, over its `owned` devices.

    `shape` is that of the trainer's mesh. Axes that `config.sampler_mesh` leaves at 0 are as there:
    all of them in one process, else as far as the devices of a process go; `data` takes the rest.
    Raises `ConfigError` for what does not divide the devices.
    """
    asked = config.sampler_mesh.sizes()
    if processes == 1 and not any(asked.values()):
        return dict(shape)
    # What is asked for takes its devices first.
    fixed = math.prod(size for size in asked.values() if size)
    if owned % fixed:
        written = " x ".join(f"sampler_mesh.{name}={size}" for name, size in asked.items() if size)
        raise ConfigError(f"{written} must divide the {owned} devices that each process samples on")
    left, sizes = owned // fixed, dict.fromkeys(AXES, 1)
    for axis in _INNER:
        sizes[axis] = asked[axis] or math.gcd(shape[axis], left)
        left //= 1 if asked[axis] else sizes[axis]
    return sizes | {"data": left}


def check_shares(
    config: ExperimentConfig,
    model: ModelConfig,
    sizes: Mapping[str, int] | None,
    processes: int,
) -> None:
    """Raise `ConfigError`, with the numbers, unless slots and prompts divide among `processes` that
    each sample on a mesh of these `sizes` (None: they do not sample), and it divides the `model`.
    """
    batch, group = config.train.batch_size, config.rollout.group_size
    rule = f"a multiple of {processes} processes x rollout.group_size={group}"
    demand(batch % (processes * group) == 0, "train.batch_size", batch, rule)
    if sizes is None:
        return
    try:
        check_mesh(model, sizes)
    except ConfigError as error:
        raise ConfigError(f"the mesh that a process samples on: {error}") from None
    slots = config.rollout.slots
    axes = {axis: sizes[axis] for axis in DEFAULT_RULES.spec(("slots",))[0] if sizes[axis] > 1}
    shards = math.prod(axes.values())
    parts = " x ".join(f"{axis}={size}" for axis, size in axes.items()) or "1"
    if processes > 1:
        rule = f"a multiple of {processes} processes x {parts} of the mesh that each samples on"
    else:
        rule = f"a multiple of {parts} of the mesh that samples"
    demand(slots % (processes * shards) == 0, "rollout.slots", slots, rule)

"""Handing weights over in memory: copies that survive the donation of the trainer's own arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

from jaxrl.errors import WeightVersionError
from jaxrl.models.lora import join_frozen, split_frozen
from jaxrl.sharding import copy_to_processes, reshard
from jaxrl.types import WeightVersion
from jaxrl.weights.digest import stamp


def copy_to(params: Any, shardings: Any | Sharding | None = None) -> Any:
    """A copy of `params` under `shardings`: a tree, one for all, or None for the same layout.

    Also across meshes and sets of devices. The copy never shares memory with `params`: the train
    step donates those, and `jax.device_put` to an equal sharding would only give them a second
    name.
    """
    if shardings is None:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    return reshard(params, shardings)


def publish(
    params: Any, number: int, shardings: Any | Sharding | None = None
) -> tuple[Any, WeightVersion]:
    """The weights as version `number`: (a copy as from `copy_to`, its version with the digest).

    Frozen weights are no copies in the same layout: nobody donates them. The digest is that of the
    source; whoever receives the copy recomputes it there.
    """
    # The copy is dispatched first, so that devices are busy while the host waits for the digest.
    copy = snapshot(params) if shardings is None else copy_to(params, shardings)
    return copy, stamp(params, number)


def publish_to_processes(
    params: Any, number: int, meshes: Sequence[Mesh], shardings: Any, *, frozen: Any = None
) -> tuple[Any, WeightVersion]:
    """`publish` of weights that are spread over processes: each gets a whole copy under
    `shardings`, on its own mesh among `meshes`; see `sharding.copy_to_processes`.

    `frozen` is the frozen part of an earlier copy, which is then taken as it is.
    """
    trained, rest = split_frozen(params)
    to, rest_to = split_frozen(shardings)
    copy = copy_to_processes(trained, meshes, to)
    if frozen is None:
        frozen = copy_to_processes(rest, meshes, rest_to)
    return join_frozen(copy, frozen), stamp(params, number)


def snapshot(params: Any) -> Any:
    """A copy of `params` that outlives the next update: of what is trained, in the same layout."""
    trained, frozen = split_frozen(params)
    return join_frozen(copy_to(trained), frozen)


def check_number(version: WeightVersion) -> None:
    """Raises WeightVersionError for a number that devices cannot write beside each token."""
    if not -(2**31) <= version.number < 2**31:
        raise WeightVersionError(f"version number {version.number} must be an integer of 32 bits")


def check_newer(present: WeightVersion, version: WeightVersion) -> None:
    """Raises WeightVersionError unless `version` may follow `present`: numbers must not fall, and
    one number has one digest."""
    if version.number < present.number:
        raise WeightVersionError(
            f"weights {version} are older than the present {present}: numbers must not fall"
        )
    if version.number == present.number and version.digest != present.digest:
        raise WeightVersionError(
            f"weights {version} and the present {present} have one number but differ"
        )

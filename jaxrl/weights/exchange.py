"""Handing weights over in memory: copies that survive the donation of the trainer's own arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, Sharding

from jaxrl.errors import WeightVersionError
from jaxrl.models.lora import join_frozen, split_frozen
from jaxrl.models.narrow import narrow
from jaxrl.sharding import copy_to_processes, reshard
from jaxrl.types import WeightVersion
from jaxrl.weights.digest import compute_digest, stamp, verify


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


class Published(NamedTuple):
    """A sampler's copy of the weights, the version they are, and the digest of the copy itself:
    that of the version, unless the copy is in a narrower dtype (`narrow`)."""

    params: Any
    version: WeightVersion
    digest: str

    @property
    def narrow(self) -> bool:
        """Whether the copy has other bits than the version."""
        return self.digest != self.version.digest


def publish_to_sampler(
    params: Any,
    number: int,
    abstract: Any,
    shardings: Any,
    *,
    meshes: Sequence[Mesh] = (),
    frozen: Any = None,
) -> Published:
    """`publish` in the dtypes of `abstract` (`models.narrow`) and under `shardings`, on any mesh.

    With `meshes`, of several processes, each of which calls this, each gets a whole copy on its
    own; see `sharding.copy_to_processes`. `frozen` is the frozen part of an earlier copy, which is
    then taken as it is.

    A narrower copy is verified here: its digest is taken where the weights are trained, and again
    where it has arrived (`WeightVersionError`).
    """
    trained, rest = split_frozen(params)
    to, rest_to = split_frozen(shardings)
    slim = narrow(trained, split_frozen(abstract)[0])
    copy = copy_to_processes(slim, meshes, to) if meshes else _own_copy(slim, trained, to)
    if frozen is None:
        # Nobody donates what is frozen: in the same layout it is shared.
        frozen = copy_to_processes(rest, meshes, rest_to) if meshes else _under(rest, rest_to)
    copy, version = join_frozen(copy, frozen), stamp(params, number)
    if slim is trained:
        return Published(copy, version, version.digest)
    digest = compute_digest(join_frozen(slim, rest))
    expected = WeightVersion(number, digest)
    verify(copy, expected, source=f"the sampler's copy of {version}")
    return Published(copy, version, digest)


def _own_copy(slim: Any, trained: Any, shardings: Any) -> Any:
    """`slim` under `shardings`, sharing nothing with `trained`, some of whose arrays it may hold.

    What was cast is a copy already, and stays where it is if it lies right.
    """
    leaves, treedef = jax.tree.flatten(slim)
    targets = treedef.flatten_up_to(shardings)
    shared = [new is old for new, old in zip(leaves, jax.tree.leaves(trained), strict=True)]
    return treedef.unflatten(_copied(leaves, targets, shared))


def _under(tree: Any, shardings: Any) -> Any:
    """`tree` under `shardings`; arrays that lie so already are the same ones."""
    leaves, treedef = jax.tree.flatten(tree)
    targets = treedef.flatten_up_to(shardings)
    return treedef.unflatten(_copied(leaves, targets, [False] * len(leaves)))


def _copied(leaves: list, targets: list, always: list[bool]) -> list:
    """The leaves under `targets`, copied where that is `always` to be, or where they lie wrong."""
    moved = [
        i
        for i, (leaf, to) in enumerate(zip(leaves, targets, strict=True))
        if always[i] or not leaf.sharding.is_equivalent_to(to, leaf.ndim)
    ]
    copies = reshard([leaves[i] for i in moved], [targets[i] for i in moved])
    leaves = list(leaves)
    for i, copy in zip(moved, copies, strict=True):
        leaves[i] = copy
    return leaves


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

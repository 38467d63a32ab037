"""The groups of devices of a collective, from each of the forms in which HLO writes them."""

from __future__ import annotations

import itertools
import json
import math
import re

import numpy as np

from jaxrl.errors import DistributedError

Groups = tuple[tuple[int, ...], ...]

_MOST_DEVICES = 1 << 20
_LISTS = r"\{(?:\{[\d,]*\},?)*\}"
_IOTA = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
_MESH = r"mesh\[[^\]]*\](?:, device_ids=\((?:[^()]|\([^()]*\))*\))? \{[^}]*\}"
_GROUPS = re.compile(rf"\breplica_groups=(?:({_LISTS})|({_IOTA})|({_MESH}))")
_PAIRS = re.compile(rf"\bsource_target_pairs=({_LISTS})")
_AXIS = re.compile(r"'?([^'=,]+)'?=(\d+)")
_USED = re.compile(r"'?([^':,{}]+)'?(?::\((\d+)\)(\d+))?")


def read_groups(attributes: str, replicas: int, partitions: int) -> Groups:
    """The groups that `attributes` of a collective name: device ids, or (source, target) pairs.

    An id is the position of a device in the program's assignment of devices, which is that in
    `mesh.devices.flat`. No groups at all means one of all devices. Raises `DistributedError` for a
    form that is not known.
    """
    pairs = _PAIRS.search(attributes)
    if pairs:
        return _from_lists(pairs.group(1))
    match = _GROUPS.search(attributes)
    if match is None:
        if "replica_groups=" in attributes:
            written = attributes.split("replica_groups=", 1)[1][:80]
            raise DistributedError(f"replica_groups={written}: a form of HLO that is not known")
        return (tuple(range(replicas * partitions)),)
    lists, iota, mesh = match.groups()
    groups = _from_lists(lists) if lists else _from_iota(iota) if iota else _from_mesh(mesh)
    if not groups:
        return (tuple(range(replicas * partitions)),)
    across = "channel_id=" in attributes and "use_global_device_ids=true" not in attributes
    if across and "to_apply=" in attributes and partitions > 1:
        # Without global ids, those of a reduction over a channel are replicas, with all partitions.
        return tuple(
            tuple(replica * partitions + p for replica in group for p in range(partitions))
            for group in groups
        )
    return groups


def _from_lists(text: str) -> Groups:
    """`{{0,2},{1,3}}`."""
    return tuple(tuple(group) for group in json.loads(text.translate({123: "[", 125: "]"})))


def _from_iota(text: str) -> Groups:
    """`[2,2]<=[4]`, `[2,2]<=[2,2]T(1,0)`: shape of groups, shape of all devices, transposition."""
    shape, source = text.split("<=")
    return _tuples(_arranged(source).reshape(_integers(shape)))


def _arranged(text: str) -> np.ndarray:
    """`[4,2]T(1,0)` -> ids counted over a [4, 2] array, transposed."""
    dims, _, order = text.partition("T")
    shape = _integers(dims)
    if math.prod(shape) > _MOST_DEVICES:
        raise ValueError(f"{text} are more than {_MOST_DEVICES} devices")
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_integers(order)) if order else ids


def _from_mesh(text: str) -> Groups:
    """`mesh['a'=4,'b'=2], device_ids=(...) {'b'}`; a part of an axis is `'a':(before)size`."""
    match = re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}$", text)
    assert match is not None  # _MESH has matched already
    axes = {name: int(size) for name, size in _AXIS.findall(match.group(1))}
    used = [(n, int(b or 1), int(s or axes[n])) for n, b, s in _USED.findall(match.group(3))]
    ids = _mesh_ids(match.group(2), math.prod(axes.values()))
    # Every axis is cut where a used part of it begins or ends; whole axes are one piece.
    pieces: list[tuple[str, int, int]] = []
    for name, size in axes.items():
        cuts = {1, size} | {c for n, b, s in used if n == name for c in (b, b * s)}
        ordered = sorted(cuts) if size > 1 else [1, 1]
        pieces += [(name, b, e // b) for b, e in itertools.pairwise(ordered)]
    inside = [pieces.index(piece) for piece in used]
    outside = [i for i in range(len(pieces)) if i not in inside]
    grid = ids.reshape([size for _, _, size in pieces]).transpose(outside + inside)
    return _tuples(grid.reshape(-1, math.prod(size for _, _, size in used)))


def _mesh_ids(text: str | None, count: int) -> np.ndarray:
    if not text:
        return _arranged(f"[{count}]")
    if text.startswith("["):
        return _arranged(text.rsplit("<=", 1)[-1]).reshape(-1)
    return np.asarray(_integers(text))


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _tuples(groups: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in group) for group in groups.reshape(len(groups), -1))

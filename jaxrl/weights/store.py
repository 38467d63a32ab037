"""Published weight versions on disk: `<path>/<number>/` holds the weights (Orbax) and their stamp.

The stamp is plain JSON in `<number>/stamp/metadata`. A version appears under its number only when
it is complete, by one rename, so a process that is killed while it publishes leaves nothing that
others could take for a version. Reading verifies: the digest of what was read is computed anew, on
the devices it was read to.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding

from jaxrl.errors import CheckpointError, WeightVersionError
from jaxrl.models.lora import holds_adapters, join_frozen, split_frozen
from jaxrl.types import WeightVersion
from jaxrl.weights import disk
from jaxrl.weights.digest import verify

_PARAMS, _STAMP = "params", "stamp"
_STAMP_FILE = f"{_STAMP}/metadata"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What the store knows of a version without reading its weights.

    `tensors` maps names to (shape, dtype), `time` is when it was written (ISO 8601, UTC), and
    `metadata` is what the publisher added.
    """

    version: WeightVersion
    tensors: disk.Tensors
    time: str
    metadata: Mapping[str, Any]


class WeightStore:
    """Versions in the directory `path`. One process publishes; any number may read at the same
    time.

    With `read_only`, nothing is created and `publish` and `prune` are refused.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False):
        self.path = Path(path).absolute()
        self.read_only = read_only
        self._clean = False
        disk.quiet_orbax()

    def publish(
        self, params: Any, version: WeightVersion, *, metadata: Mapping[str, Any] | None = None
    ) -> bool:
        """Write `params` as `version`; returns when they are on disk. False: they already were.

        Of a model with adapters only these are written; the digest is that of all weights.

        Raises `WeightVersionError` if the digest of `params` is not that of `version`, or if the
        number is taken by other weights; `OutputError` if the directory cannot be written;
        `ValueError` if `metadata` is not JSON.
        """
        self._refuse_read_only("publish")
        if version.number < 0:
            raise ValueError(f"version number {version.number} must not be negative")
        if version.number in self.numbers():
            stored = self.stamp(version.number).version
            if stored.digest != version.digest:
                raise WeightVersionError(
                    f"{self.path} already holds version {version.number} with digest "
                    f"{stored.digest}; it cannot be published again with digest {version.digest}"
                )
            return False
        verify(params, version, source="weights to be published")
        trained, _ = split_frozen(params)
        record = _to_json(version, disk.tensors_of(trained), dict(metadata or {}))
        self._prepare()
        self._write(version.number, trained, record)
        return True

    def restore(
        self,
        number: int | None = None,
        abstract: Any = None,
        shardings: Any | Sharding | None = None,
        *,
        frozen: Any = None,
    ) -> tuple[Any, WeightVersion]:
        """Read version `number` (None: the latest) -> (params, version), with the digest verified.

        `abstract` is the tree of `jax.ShapeDtypeStruct` (or arrays) that the model expects; None
        takes what is stored, as nested dicts. `shardings` is a tree of them, one for all, or None:
        those of `abstract`, else the first device. If the version holds only adapters, `abstract`
        and `shardings` are those of the whole model, and `frozen` are the weights they belong to.

        Raises `CheckpointError` for a version that is missing (listing those that exist), damaged,
        or does not fit `abstract` (naming tensors and both shapes), and `WeightVersionError` if the
        weights read are not those that the stamp claims.
        """
        number = self._latest_number() if number is None else number
        stamp = self.stamp(number)
        folder = self.path / str(number)
        if abstract is None:
            abstract = _nested(stamp.tensors)
        wanted, rest = split_frozen(abstract)
        if holds_adapters(stamp.tensors) and not (rest and frozen):
            raise CheckpointError(
                f"{folder} holds adapters only: `abstract` must be that of the whole model, and "
                "`frozen` the weights that the adapters belong to"
            )
        if shardings is not None and not isinstance(shardings, Sharding):
            shardings, _ = split_frozen(shardings)
        disk.check_tensors(stamp.tensors, disk.tensors_of(wanted), str(folder))
        target = disk.with_shardings(wanted, shardings)
        source = f"{folder} with the frozen weights" if rest else str(folder)
        params = join_frozen(self._read(folder, target), frozen if rest else {})
        verify(params, stamp.version, source=source)
        return params, stamp.version

    def stamp(self, number: int) -> Stamp:
        """The stamp of version `number`. Raises `CheckpointError` if it is missing or damaged."""
        path = self.path / str(number) / _STAMP_FILE
        try:
            record = disk.read_json(path)
        except FileNotFoundError:
            raise CheckpointError(self._missing(number)) from None
        with disk.input_errors(path):
            stamp = _from_json(record)
        if stamp.version.number != number:
            raise WeightVersionError(
                f"{path} is the stamp of version {stamp.version.number}, not of {number}"
            )
        return stamp

    def numbers(self) -> list[int]:
        """Numbers of the complete versions, ascending."""
        return disk.complete_steps(self.path, _STAMP_FILE)

    def versions(self) -> list[WeightVersion]:
        """The complete versions, ascending by number."""
        found = []
        for number in self.numbers():
            try:
                found.append(self.stamp(number).version)
            except CheckpointError:
                # Pruned by the writer since it was listed; a damaged one is still an error.
                if number in self.numbers():
                    raise
        return found

    def latest(self) -> WeightVersion | None:
        """The version with the highest number, or None."""
        versions = self.versions()
        return versions[-1] if versions else None

    def prune(self, keep_last: int = 1, *, pinned: Iterable[int] = ()) -> list[int]:
        """Delete all but the first, the last `keep_last` and `pinned`; returns the deleted."""
        self._refuse_read_only("prune")
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last} must be at least 1")
        numbers = self.numbers()
        kept = {*numbers[:1], *numbers[-keep_last:], *pinned}
        doomed = [number for number in numbers if number not in kept]
        for number in doomed:
            disk.remove_step(self.path, number)
        return doomed

    def discard_after(self, number: int) -> list[int]:
        """Delete the versions above `number`, which a resumed run will make anew; returns them."""
        self._refuse_read_only("discard")
        doomed = [later for later in self.numbers() if later > number]
        for later in reversed(doomed):
            disk.remove_step(self.path, later)
        return doomed

    def _prepare(self) -> None:
        disk.make_folder(self.path)
        if not self._clean:
            disk.remove_leftovers(self.path)
            self._clean = True

    def _write(self, number: int, params: Any, record: Mapping[str, Any]) -> None:
        import orbax.checkpoint as ocp

        folder = self.path / str(number)
        items = ocp.args.Composite(
            **{_PARAMS: ocp.args.StandardSave(params), _STAMP: ocp.args.JsonSave(record)}
        )
        with disk.output_errors(folder):
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                # Removes what a killed process may have left of this number.
                checkpointer.save(folder, args=items)

    def _read(self, folder: Path, target: Any) -> Any:
        import orbax.checkpoint as ocp

        items = ocp.args.Composite(**{_PARAMS: ocp.args.StandardRestore(target)})
        with disk.input_errors(folder):
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                return checkpointer.restore(folder, args=items)[_PARAMS]

    def _latest_number(self) -> int:
        numbers = self.numbers()
        if not numbers:
            raise CheckpointError(f"{self.path} holds no weight version")
        return numbers[-1]

    def _missing(self, number: int) -> str:
        found = ", ".join(map(str, self.numbers())) or "none"
        return f"{self.path} holds no complete version {number}; there are: {found}"

    def _refuse_read_only(self, verb: str) -> None:
        if self.read_only:
            raise CheckpointError(f"cannot {verb}: the store {self.path} was opened read-only")


def _to_json(
    version: WeightVersion, tensors: disk.Tensors, metadata: dict[str, Any]
) -> dict[str, Any]:
    """The stamp as it stands on disk."""
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata={metadata!r} must be JSON: {error}") from error
    return {
        "format": _FORMAT,
        "number": version.number,
        "digest": version.digest,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tensors": disk.tensors_to_json(tensors),
        "metadata": metadata,
    }


def _from_json(record: Mapping[str, Any]) -> Stamp:
    if record["format"] != _FORMAT:
        raise CheckpointError(f"stamp of format {record['format']}; this release reads {_FORMAT}")
    return Stamp(
        version=WeightVersion(int(record["number"]), str(record["digest"])),
        tensors=disk.tensors_from_json(record["tensors"]),
        time=record["time"],
        metadata=record["metadata"],
    )


def _nested(tensors: disk.Tensors) -> dict[str, Any]:
    """Names -> nested dicts of `jax.ShapeDtypeStruct`."""
    tree: dict[str, Any] = {}
    for name, (shape, dtype) in tensors.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.ShapeDtypeStruct(shape, dtype)
    return tree

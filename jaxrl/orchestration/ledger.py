"""The append-only record of everything that happened to the data and the weights of a run.

`ledger.jsonl` holds one JSON object per line: `seq` (0, 1, 2, … without gaps), `time` (seconds
since the epoch), `event`, and the fields of the event:

    started       version                        a run begins
    resumed       version                        goes on from a checkpoint; later work is void
    published     version, digest                these weights may be sampled from
    dispatched    group_id, prompt_index, sample_ids, version [attempt, after]
    accepted      group_id, prompt_index, sample_ids
    rejected      group_id, prompt_index, sample_ids, sample_id, reason, detail
    dropped       group_id, prompt_index, sample_ids, version, oldest_version
    consumed      update, group_id, prompt_index, samples, digests
    updated       update, version, phase         the update's batch made these weights
    evaluated     version, …                     checkpointed  version, phase  finished  version

A checkpoint is noted when it is complete on disk. The phase is "sft" (the cold start, whose batches
follow from the config and are not listed) or "rl". An update is named by the version that it starts
from: update v consumes the batch of version v and makes version v + 1. Each of `samples` is
`{"sample_id", "tokens", "first_version", "last_version", "reward"}` with `tokens` the number that
were sampled; `digests` maps every version among them (as a string) to the digest published for it.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.errors import DataError, OutputError, WeightVersionError
from jaxrl.types import Trajectory, TrajectoryGroup, WeightVersion

EVENTS = (
    "dispatched",
    "accepted",
    "rejected",
    "dropped",
    "consumed",
    "updated",
    "published",
    "evaluated",
    "checkpointed",
    "started",
    "resumed",
    "finished",
)

Record = dict[str, Any]


class Ledger:
    """Writes a ledger; `append` may be called from any thread and returns when the line is out.

    Opening an existing file goes on with its `seq`. A last line torn by a kill is moved to
    `<name>.torn`. One process writes at a time: `RunDir` sees to that.
    """

    def __init__(self, path: Path | str):
        """Raises `OutputError` if the file cannot be written, `DataError` if it is malformed."""
        self._path = Path(path)
        self._lock = threading.Lock()
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise OutputError(f"cannot open the ledger {path}: {error.strerror}") from error
        try:
            self._set_aside_torn_line()
            records = read_ledger(self._path)
        except BaseException:
            os.close(self._fd)
            raise
        self._seq = len(records)
        self._digests = published_versions(records)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def append(self, event: str, **fields: Any) -> int:
        """Write one event; returns its `seq`. Raises `OutputError` if the file cannot take it."""
        if event not in EVENTS:
            raise ValueError(f"unknown ledger event {event!r}; known: {', '.join(EVENTS)}")
        if reserved := {"seq", "time", "event"} & set(fields):
            raise ValueError(f"ledger fields {sorted(reserved)} are set by the ledger itself")
        with self._lock:
            record = {"seq": self._seq, "time": round(time.time(), 3), "event": event, **fields}
            line = json.dumps(_plain(record), allow_nan=False, separators=(",", ":")) + "\n"
            self._write(line.encode())
            self._seq += 1
            if event in ("published", "resumed", "started"):
                self._digests = _after(self._digests, record)
            return self._seq - 1

    def published(self, version: WeightVersion, **fields: Any) -> int:
        """Write that these weights may be sampled from.

        Raises `WeightVersionError` if the number was published with another digest before.
        """
        with self._lock:
            known = self._digests.get(version.number, version.digest)
        if known != version.digest:
            raise WeightVersionError(
                f"version {version.number} was published with digest {known}, and again with "
                f"{version.digest}; one number names one set of weights"
            )
        return self.append("published", version=version.number, digest=version.digest, **fields)

    def consumed(self, groups: Sequence[TrajectoryGroup], update: int, **fields: Any) -> None:
        """Write which samples update `update` trains on, one event per group.

        Raises `WeightVersionError` if a token claims a version that was never published: then
        nothing is written.
        """
        with self._lock:
            digests = dict(self._digests)
        events = [_consumption(group, update, digests) for group in groups]
        for event in events:
            self.append("consumed", **event, **fields)

    def close(self) -> None:
        """Close the file; may be repeated."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _write(self, data: bytes) -> None:
        if self._fd < 0:
            raise OutputError(f"the ledger {self._path} is closed")
        end = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                # The second attempt gives the reason: a short write reports none.
                written += os.write(self._fd, data[written:])
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            os.ftruncate(self._fd, end)
            raise OutputError(f"cannot write to the ledger {self._path}: {error}") from error

    def _set_aside_torn_line(self) -> None:
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole == len(data):
            return
        with self._path.with_name(self._path.name + ".torn").open("ab") as aside:
            aside.write(data[whole:] + b"\n")
        os.ftruncate(self._fd, whole)


def _plain(value: Any) -> Any:
    """JSON of records, arrays and numbers; numbers that are not finite become strings."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _consumption(group: TrajectoryGroup, update: int, digests: Mapping[int, str]) -> dict[str, Any]:
    used: set[int] = set()
    for trajectory in group.trajectories:
        versions = {int(v) for v in np.unique(trajectory.versions[trajectory.loss_mask])}
        if unknown := versions - set(digests):
            raise WeightVersionError(
                f"{trajectory.sample_id} holds tokens of version {min(unknown)}, which was never "
                f"published; published are {sorted(digests)}"
            )
        used |= versions
    return {
        "update": update,
        "group_id": group.group_id,
        "prompt_index": group.prompt_index,
        "samples": [_sample(trajectory) for trajectory in group.trajectories],
        "digests": {str(v): digests[v] for v in sorted(used)},
    }


def _sample(trajectory: Trajectory) -> dict[str, Any]:
    versions = trajectory.versions[trajectory.loss_mask]
    return {
        "sample_id": trajectory.sample_id,
        "tokens": trajectory.sampled_tokens,
        "first_version": int(versions.min()),
        "last_version": int(versions.max()),
        "reward": trajectory.reward,
    }


def read_ledger(path: Path | str) -> list[Record]:
    """All records in order. Raises `DataError` naming the line that is malformed or out of order.

    A last line without its end (being written, or torn by a kill) is left out.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the ledger {path}: {error.strerror}") from error
    records: list[Record] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            record = json.loads(line)
            seq, event = record["seq"], record["event"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number} is not a ledger record: {error!r}") from error
        if seq != len(records):
            raise DataError(f"{path}:{number} has seq {seq}, expected {len(records)}")
        if event not in EVENTS:
            raise DataError(f"{path}:{number} has the unknown event {event!r}")
        records.append(record)
    return records


def effective(records: Iterable[Record]) -> list[Record]:
    """The records without those that a later start or resume made void.

    Starting undoes everything before. Resuming at version n undoes every update from n on: its
    consumptions, its new version, and evaluations and checkpoints of versions after n.
    """
    kept: list[Record] = []
    for record in records:
        if record["event"] == "started":
            kept = []
        if record["event"] == "resumed":
            kept = [r for r in kept if not _void(r, record["version"])]
        kept.append(record)
    return kept


def _void(record: Record, version: int) -> bool:
    """Whether resuming at `version` undoes what the record says."""
    if record["event"] in ("consumed", "updated"):
        return record["update"] >= version
    if record["event"] in ("published", "evaluated", "checkpointed", "finished"):
        return record.get("version", version) > version
    return False


def published_versions(records: Iterable[Record]) -> dict[int, str]:
    """Version number -> digest of the versions published and not made void."""
    digests: dict[int, str] = {}
    for record in records:
        digests = _after(digests, record)
    return digests


def _after(digests: dict[int, str], record: Record) -> dict[int, str]:
    """The digests once `record` is known."""
    if record["event"] == "started":
        return {}
    if record["event"] == "resumed":
        return {n: digest for n, digest in digests.items() if n <= record["version"]}
    if record["event"] == "published":
        return digests | {int(record["version"]): str(record["digest"])}
    return digests


def consumed_samples(records: Iterable[Record]) -> dict[int, list[str]]:
    """Update -> the ids of the samples that it trained on, without what a resume made void."""
    updates: dict[int, list[str]] = {}
    for record in effective(records):
        if record["event"] == "consumed":
            ids = [sample["sample_id"] for sample in record["samples"]]
            updates.setdefault(record["update"], []).extend(ids)
    return updates

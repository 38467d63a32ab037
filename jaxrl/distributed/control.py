"""What processes tell each other outside of their programs: a store of keys and bounded waits.

The store is that of `jax.distributed`, which has no public interface; this is the one place that
knows its client.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.distributed.sides import name_processes
from jaxrl.errors import DistributedError, HangError

_SLICE_S = 0.5
"""How long one wait lasts before it is asked whether waiting still makes sense."""
_REASON = 2000
"""Characters that are kept of why a process left."""


@dataclasses.dataclass(frozen=True)
class Left:
    """A process is no longer part of the job: why, empty if it has done all its work.

    `follows`: because another had gone before.
    """

    reason: str
    follows: bool = False


class Control:
    """This process's end of the store. `client` is that of `jax.distributed`, or one like it.

    `may_wait`, called during waits, raises if there is no use in waiting. `describe` says in words
    what a process was last seen doing.
    """

    def __init__(self, client: Any, job: str, index: int, count: int):
        self._client, self._root = client, f"jaxrl/{job}"
        self.index, self.count = index, count
        self.may_wait: Callable[[], None] = lambda: None
        self.describe: Callable[[int], str] = lambda process: ""
        self._calls: collections.Counter[str] = collections.Counter()

    def put(self, key: str, value: bytes) -> None:
        """Set `key` for all to see; replaces what it held."""
        self._client.key_value_set_bytes(f"{self._root}/{key}", value, allow_overwrite=True)

    def folder(self, name: str) -> dict[int, bytes]:
        """What every process has put at `name`/PROCESS."""
        pairs = self._client.key_value_dir_get_bytes(f"{self._root}/{name}/")
        return {int(key.rsplit("/", 1)[1]): value for key, value in pairs}

    def gather(
        self,
        tag: str,
        value: bytes,
        *,
        timeout_s: float,
        waiting_for: str,
        members: Sequence[int] | None = None,
    ) -> dict[int, bytes]:
        """What each of `members` (None: all) gives for `tag`, which must not be used twice.

        Raises `HangError` if some do not within `timeout_s`, `DistributedError` if one of them has
        left the job; both name them.
        """
        members = range(self.count) if members is None else members
        self.put(f"{tag}/{self.index}", value)
        deadline = time.monotonic() + timeout_s
        values = {self.index: value}
        for member in members:
            while member not in values:
                found = self._wait(f"{tag}/{member}", deadline)
                if found is not None:
                    values[member] = found
                else:
                    self._look_around(tag, members, deadline, timeout_s, waiting_for)
        return values

    def next_call(self, group: str) -> int:
        """The number of the next call of `group`, from 0."""
        self._calls[group] += 1
        return self._calls[group] - 1

    def forget(self, tag: str) -> None:
        """Take away what this process put at `tag`, once nobody reads it any more."""
        self._client.key_value_delete(f"{self._root}/{tag}/{self.index}")

    def leave(self, reason: str = "", *, follows: bool = False) -> None:
        """Tell the others that this process is no longer part of the job, and why."""
        record = dataclasses.asdict(Left(reason[:_REASON], follows))
        self.put(f"left/{self.index}", json.dumps(record).encode())

    def left(self) -> dict[int, Left]:
        """The processes that have left."""
        return {p: Left(**json.loads(value)) for p, value in self.folder("left").items()}

    def _wait(self, key: str, deadline: float) -> bytes | None:
        left = deadline - time.monotonic()
        milliseconds = max(1, int(1000 * min(_SLICE_S, left)))
        try:
            return self._client.blocking_key_value_get_bytes(f"{self._root}/{key}", milliseconds)
        except Exception as error:  # jaxlib raises its runtime error, whose text holds the code
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            raise DistributedError(f"the coordinator cannot be reached: {_first(error)}") from error

    def _look_around(
        self, tag: str, members: Sequence[int], deadline: float, timeout_s: float, what: str
    ) -> None:
        """Raise if the wait for `members` cannot end well."""
        self.may_wait()
        arrived = self.folder(tag)
        absent = [member for member in members if member not in arrived]
        gone = {p: left for p, left in self.left().items() if p in absent}
        if gone:
            raise DistributedError(f"process {self.index} waits for {what}: {departures(gone)}")
        if absent and time.monotonic() >= deadline:
            seen = "".join(f"; {text}" for p in absent if (text := self.describe(p)))
            raise HangError(
                f"process {self.index} waited {timeout_s:g} s for {what}: {name_processes(absent)} "
                f"of {self.count} did not arrive{seen}"
            )


def departures(gone: Mapping[int, Left]) -> str:
    """Who left and why: "process 1 left the job: ValueError: x; process 2 has ended". Those that
    only followed are named where nobody else is."""
    first = {p: left for p, left in gone.items() if not left.follows}
    return "; ".join(
        f"process {p} left the job: {left.reason}" if left.reason else f"process {p} has ended"
        for p, left in sorted((first or gone).items())
    )


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

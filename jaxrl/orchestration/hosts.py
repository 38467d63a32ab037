"""The processes of a run as equals: each does its share, and what they must agree on is exchanged.

Everything here is called by every process in the same order, from the thread that trains: the
exchange is a collective like those of the train step. With one process nothing is exchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxrl.distributed import current
from jaxrl.errors import DistributedError
from jaxrl.orchestration.interrupts import Interrupted

_T = TypeVar("_T")
_DONE, _FAILED, _INTERRUPTED = b"+", b"-", b"!"
_SMALL = 1 << 14  # bytes


def index() -> int:
    """The number of this process, 0 … count - 1."""
    return current().index


def count() -> int:
    """How many processes the run has."""
    return current().count


def share(items: Sequence[_T]) -> Sequence[_T]:
    """Every count-th of `items`, beginning with this process's number: no overlap, no rest."""
    return items[index() :: count()]


def interleave(shares: Sequence[Sequence[_T]]) -> list[_T]:
    """The shares of all processes, in order -> the items that they were taken from."""
    total = sum(map(len, shares))
    return [shares[i % len(shares)][i // len(shares)] for i in range(total)]


def together(what: str, work: Callable[[], bytes]) -> list[bytes]:
    """What `work` gives on every process, in their order.

    If it raises on some process, it raises on all: there the error itself, elsewhere
    `DistributedError` that names the process, `what` and the error; a signal that interrupts one
    process interrupts all.
    """
    if count() == 1:
        return [work()]
    # Sampling and scoring are no programs of all: they may take any time.
    current().idle(what)
    own: BaseException | None = None
    try:
        record = _DONE + work()
    except Interrupted as error:
        own, record = error, _INTERRUPTED + str(error.signum).encode()
    except BaseException as error:
        # Whatever it is, the others must not wait for it.
        own, record = error, _FAILED + f"{type(error).__name__}: {error}".encode()
    records = _exchange(record, what)
    if own is not None:
        raise Agreed.mark(own)
    for process, other in enumerate(records):
        if other[:1] == _INTERRUPTED:
            raise Agreed.mark(Interrupted(int(other[1:])))
        if other[:1] == _FAILED:
            reason = other[1:].decode(errors="replace")
            raise Agreed.mark(DistributedError(f"process {process} failed at {what}: {reason}"))
    return [other[1:] for other in records]


def exchange(what: str, work: Callable[[], Any]) -> list[Any]:
    """What `work` gives on every process, as JSON carries it, on every process."""
    if count() == 1:
        return [work()]
    return [json.loads(record) for record in together(what, lambda: json.dumps(work()).encode())]


def from_first(what: str, work: Callable[[], Any]) -> Any:
    """What `work` gives on process 0, as JSON carries it, on every process."""
    if count() == 1:
        return work()
    records = together(what, lambda: json.dumps(work()).encode() if index() == 0 else b"")
    return json.loads(records[0])


class Agreed:
    """Whether an error was raised on every process at the same place, so that what follows it may
    be done by all of them together."""

    _NAME = "_jaxrl_agreed"

    @classmethod
    def mark(cls, error: BaseException) -> BaseException:
        """The error, known to be raised everywhere."""
        setattr(error, cls._NAME, True)
        return error

    @classmethod
    def on(cls, error: BaseException) -> bool:
        """Always so with one process."""
        return count() == 1 or getattr(error, cls._NAME, False)


def _exchange(record: bytes, what: str) -> list[bytes]:
    """The records of all processes. Small ones go through the coordinator, which does not wait for
    the devices; large ones between the devices, which does not burden the coordinator."""
    small = record if len(record) <= _SMALL else b""
    headers = current().exchange(what, len(record).to_bytes(8, "big") + small)
    sizes = [int.from_bytes(header[:8], "big") for header in headers]
    if max(sizes) <= _SMALL:
        return [header[8:] for header in headers]
    from jax.experimental import multihost_utils

    # Rounded up, so that few programs are compiled.
    padded = np.zeros(1 << (max(sizes) - 1).bit_length(), np.uint8)
    padded[: len(record)] = np.frombuffer(record, np.uint8)
    current().enter(f"the exchange of {what}")
    rows = multihost_utils.process_allgather(padded)
    current().idle(what)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

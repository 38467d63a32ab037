"""Collectives of small values on the host, over an explicit group of processes.

For decisions, counts and metrics, a few megabytes at most: they travel through the coordinator.
Weights and batches belong into programs. Every call is numbered, and nothing is used before all
members have come with the same kind, reduction, source, dtype and shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from jaxrl.distributed.control import Control
from jaxrl.distributed.groups import Group
from jaxrl.distributed.sides import sides_of
from jaxrl.errors import CollectiveOrderError

Reduction = Literal["sum", "mean", "max", "min"]

_REDUCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "mean": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.max(0),
    "min": lambda stacked: stacked.min(0),
}
_MOST_BYTES = 64 << 20


class Collectives:
    """The collectives of one group; all its members make the same calls in the same order.

    Each call raises `HangError` if a member does not come within `timeout_s`, and
    `CollectiveOrderError`, on every member, if they came with different calls.
    """

    def __init__(self, control: Control | None, group: Group, timeout_s: float):
        if group.size > 1 and control is None:
            raise ValueError(f"{group.name}: this process is not connected to others")
        self.group, self._control, self._timeout_s = group, control, timeout_s

    def all_reduce(self, value: Any, reduction: Reduction) -> np.ndarray:
        """The reduction of every member's array, elementwise, in the order of ranks."""
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction={reduction!r} must be one of {sorted(_REDUCTIONS)}")
        values = self._exchange("all-reduce", value, reduction=reduction)
        return np.asarray(_REDUCTIONS[reduction](np.stack(values)))

    def all_gather(self, value: Any) -> np.ndarray:
        """Every member's array, stacked in the order of ranks: [size, ...]."""
        return np.stack(self._exchange("all-gather", value))

    def broadcast(self, value: Any, *, source: int) -> np.ndarray:
        """The array of process `source`; the others' must have its dtype and shape.

        Raises `ValueError` if `source` is not in the group.
        """
        if source not in self.group.processes:
            raise ValueError(f"source={source!r} must be one of {self.group.processes}")
        values = self._exchange("broadcast", value, source=int(source))
        return values[self.group.processes.index(source)]

    def barrier(self, name: str, *, timeout_s: float | None = None) -> None:
        """Wait for all members; to find out who is late, not to order programs."""
        self._exchange("barrier", np.zeros((), np.int8), timeout_s=timeout_s, name=name)

    def _exchange(
        self, kind: str, value: Any, timeout_s: float | None = None, **call: Any
    ) -> list[np.ndarray]:
        """The arrays of all members by rank; in a broadcast only its source's means anything."""
        array = np.asarray(value)
        if not any(
            jax.dtypes.issubdtype(array.dtype, numeric) for numeric in (np.number, np.bool_)
        ):
            raise ValueError(f"{kind}: dtype {array.dtype} must be numeric")
        # The others read the bytes in the order of this machine, which a name does not tell.
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if array.nbytes > _MOST_BYTES:
            raise ValueError(f"{kind} of {array.nbytes} bytes: at most {_MOST_BYTES} go this way")
        if self.group.size == 1:
            return [array]
        assert self._control is not None
        number = self._control.next_call(self.group.name)
        head = {"call": kind, **call, "dtype": array.dtype.name, "shape": list(array.shape)}
        silent = call.get("source", self.group.process) != self.group.process
        body = b"" if silent else np.ascontiguousarray(array).tobytes()
        tag = f"call/{self.group.name}/{number}"
        received = self._control.gather(
            tag,
            json.dumps(head).encode() + b"\n" + body,
            members=self.group.processes,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            waiting_for=f"{_words(head)}, call {number} of {self.group.name}",
        )
        if number >= 2:
            # All have come here, so all are done with the call before the last.
            self._control.forget(f"call/{self.group.name}/{number - 2}")
        return self._unpack(number, received, array)

    def _unpack(
        self, number: int, received: Mapping[int, bytes], like: np.ndarray
    ) -> list[np.ndarray]:
        split = {process: data.split(b"\n", 1) for process, data in received.items()}
        heads = {process: _words(json.loads(head)) for process, (head, _) in split.items()}
        if len(set(heads.values())) > 1:
            raise CollectiveOrderError(
                f"call {number} of {self.group.name} differs: {sides_of(heads)}"
            )
        return [
            np.frombuffer(body, like.dtype).reshape(like.shape) if body else like
            for _, body in (split[process] for process in self.group.processes)
        ]


def _words(head: Mapping[str, Any]) -> str:
    """A call in words: "all-reduce sum float32[3]"."""
    shape = ",".join(map(str, head["shape"]))
    detail = {k: v for k, v in head.items() if k not in ("call", "dtype", "shape")}
    told = "".join(f" {k} {v}" if k == "source" else f" {v}" for k, v in detail.items())
    return f"{head['call']}{told} {head['dtype']}[{shape}]"

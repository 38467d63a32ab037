"""Which prompts are done with: what a checkpoint keeps so that a resume skips and repeats none."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from jaxrl.errors import CheckpointError


class Frontier:
    """Hands out prompt indices in order and remembers which were settled.

    Settled means consumed by an update or rejected; prompts that are merely running or waiting are
    not, so after a restart they are dispatched again. Not thread-safe: the collector's lock guards.
    """

    def __init__(self, state: Mapping[str, Any] | None = None):
        """`state` as returned by `state()`; None starts at prompt 0."""
        state = {"next": 0, "beyond": []} if state is None else state
        try:
            self._next = int(state["next"])
            self._beyond = {int(i) for i in state["beyond"]}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"frontier {dict(state)!r} must be {{'next': int, 'beyond': [int]}}"
            ) from error
        if self._next < 0 or any(i <= self._next for i in self._beyond):
            raise CheckpointError(
                f"frontier {dict(state)!r}: 'next' must be >= 0, and smaller than all of 'beyond'"
            )
        self._cursor = self._next
        self._again: list[int] = []

    def take(self) -> int:
        """The next index to dispatch: first those given back, then new ones in order."""
        if self._again:
            return heapq.heappop(self._again)
        while self._cursor in self._beyond:
            self._cursor += 1
        self._cursor += 1
        return self._cursor - 1

    def give_back(self, index: int) -> None:
        """The prompt gave nothing usable and has to be sampled anew."""
        heapq.heappush(self._again, index)

    def settle(self, index: int) -> None:
        """The prompt is done with."""
        self._beyond.add(index)
        while self._next in self._beyond:
            self._beyond.discard(self._next)
            self._next += 1

    def state(self) -> dict[str, Any]:
        """JSON: `next`, the smallest index not settled, and `beyond`, the settled ones after it."""
        return {"next": self._next, "beyond": sorted(self._beyond)}

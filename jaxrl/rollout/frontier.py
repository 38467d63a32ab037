"""Which prompts are done with: what a checkpoint keeps so that a resume skips and repeats none."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.errors import CheckpointError


class Frontier:
    """Hands out prompt indices in order and remembers which were settled.

    Settled means consumed by an update or rejected; prompts that are merely running or waiting are
    not, so after a restart they are dispatched again. Of `step` frontiers that share the prompts,
    this one has the indices `first`, `first` + `step`, … Not thread-safe: the collector's lock
    guards.
    """

    def __init__(self, state: Mapping[str, Any] | None = None, *, first: int = 0, step: int = 1):
        """`state` as returned by `state()` or `merged`; None starts at the first prompt."""
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
        if not 0 <= first < step:
            raise ValueError(f"first={first} must be at least 0 and below step={step}")
        self._step = step
        self._beyond = {i for i in self._beyond if i % step == first}
        # The first index of its own that is not settled.
        self._next += (first - self._next) % step
        self._advance()
        self._cursor = self._next
        self._again: list[int] = []

    def take(self) -> int:
        """The next index to dispatch: first those given back, then new ones in order."""
        if self._again:
            return heapq.heappop(self._again)
        while self._cursor in self._beyond:
            self._cursor += self._step
        self._cursor += self._step
        return self._cursor - self._step

    def give_back(self, index: int) -> None:
        """The prompt gave nothing usable and has to be sampled anew."""
        heapq.heappush(self._again, index)

    def settle(self, index: int) -> None:
        """The prompt is done with."""
        self._beyond.add(index)
        self._advance()

    def state(self) -> dict[str, Any]:
        """JSON: `next`, the smallest index not settled, and `beyond`, the settled ones after it."""
        return {"next": self._next, "beyond": sorted(self._beyond)}

    def _advance(self) -> None:
        while self._next in self._beyond:
            self._beyond.discard(self._next)
            self._next += self._step


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all frontiers that share the prompts, in order of `first` -> the state of the
    whole, from which any number of frontiers can go on."""
    step, low = len(states), min(state["next"] for state in states)
    beyond = {i for state in states for i in state["beyond"]}
    for first, state in enumerate(states):
        beyond.update(range(low + (first - low) % step, state["next"], step))
    whole = Frontier()
    whole._next, whole._beyond = low, beyond
    whole._advance()
    return whole.state()

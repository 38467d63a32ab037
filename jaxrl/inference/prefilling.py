"""Prompts on their way into slots: piece by piece, what is cached first."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl.inference.arguments import Entry, Piece
from jaxrl.inference.engine import Engine
from jaxrl.inference.prefixes import Block, piece_keys
from jaxrl.inference.requests import Request


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """One prompt int32 [P] for one or several slots, all of which get what `slots[0]` computes.

    `done` tokens are in the cache of `slots[0]`. With `resume`, the slot has drawn its next token
    already and only its cache is computed again.
    """

    prompt: np.ndarray
    version: int
    chunk: int
    slots: list[int]
    resume: bool = False
    done: int = 0
    keys: list[bytes] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart(self.version)

    def restart(self, version: int) -> None:
        """Compute everything, under the weights `version`."""
        self.version, self.done = version, 0
        self.keys = piece_keys(self.prompt, self.chunk, version)

    @property
    def key(self) -> bytes:
        """Of the next piece."""
        return self.keys[self.done // self.chunk]

    @property
    def next_length(self) -> int:
        """Tokens of the next piece."""
        return min(self.chunk, len(self.prompt) - self.done)

    @property
    def next_is_last(self) -> bool:
        """Whether the prompt ends with the next piece."""
        return self.done + self.next_length == len(self.prompt)

    def piece(self) -> Piece:
        """The next piece, to be computed."""
        tokens = self.prompt[self.done : self.done + self.next_length]
        return Piece(tokens, self.slots[0], self.done)

    def entries(self, block: Block, rows: list[Request | None]) -> list[Entry]:
        """Where the computed next piece goes: the last one into all slots."""
        slots = self.slots if self.next_is_last else self.slots[:1]
        return [Entry(slot, block[1], rows[slot].params, self.done) for slot in slots]


def next_call(jobs: list[Job], engine: Engine) -> list[Job]:
    """Jobs whose next pieces share a call with that of the first one, in order.

    A piece that would be computed twice is left for later: then it is cached.
    """
    first = jobs[0]
    bucket = engine.prefill_bucket(first.next_length)
    chosen: dict[bytes, Job] = {}
    for job in jobs:
        alike = engine.prefill_bucket(job.next_length) == bucket and job.version == first.version
        if alike and len(chosen) < engine.rows_of(bucket):
            chosen.setdefault(job.key, job)
    return list(chosen.values())

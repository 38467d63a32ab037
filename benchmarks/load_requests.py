"""What `served_load.py` asks: prompts and lengths as chats have them, the same in every run.

Needs nothing but numpy, as `shapes.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from shapes import VOCAB

REQUESTS, SLOTS, LENGTH = 200, 16, 512
SYSTEMS = (40, 96, 160)
"""Tokens of the system prompts; chats are spread over them evenly."""

LONGEST_PROMPT = 255
"""JetStream pads a prompt and a mark for its beginning to a power of two below the length."""

SHORTEST, LONGEST_OUTPUT = 4, 224
CHATS, FOLLOW_UPS = 0.6, 0.5
"""Share of requests with a system prompt, and of those that go on where an earlier one ended."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request, `at` seconds after the first."""

    tokens: list[int]
    max_tokens: int
    at: float


def make_load(content: int, rate: float | None) -> list[Ask]:
    """The requests, at `rate` a second (None: all at once), with arrivals as chance has them.

    Lengths, arrivals and who goes on with what are the same for every `content`; the tokens are
    others, so that a server does not know a prompt from a load before.
    """
    shape, words = np.random.default_rng(7), np.random.default_rng(content)
    gaps = shape.exponential(1.0, REQUESTS)
    arrivals = np.zeros(REQUESTS) if rate is None else (np.cumsum(gaps) - gaps[0]) / rate

    def said(length: int) -> list[int]:
        return words.integers(0, VOCAB, length).tolist()

    systems = [said(length) for length in SYSTEMS]
    talks: list[list[int]] = []
    asks = []
    for at in arrivals:
        user, output = lengths(shape)
        chat, follows, which, turn = shape.random(4)
        tokens = said(user)
        if chat < CHATS:
            before = systems[int(which * len(systems))]
            if talks and follows < FOLLOW_UPS:
                before = talks[int(turn * len(talks))]
            # A client would begin a new chat where the old one has become too long.
            if len(before) + user > LONGEST_PROMPT:
                before = systems[0]
            tokens = (before + tokens)[:LONGEST_PROMPT]
            # What was really answered is not known here, and nobody looks.
            talks.append(tokens + said(output))
        asks.append(Ask(tokens, output, float(at)))
    return asks


def lengths(rng: np.random.Generator) -> tuple[int, int]:
    """(tokens of what a user says, tokens of the answer): log-normal, as in logs of chats."""
    user = np.exp(rng.normal(np.log(32), 0.8))
    output = np.exp(rng.normal(np.log(48), 0.8))
    return (
        int(np.clip(user, SHORTEST, LONGEST_PROMPT)),
        int(np.clip(output, SHORTEST, LONGEST_OUTPUT)),
    )

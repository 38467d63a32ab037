"""What the tests of the collector share."""

from __future__ import annotations

import time

LONG = 30.0
"""Deadline of waits that end by themselves."""


def wait_until(condition, what: str) -> None:
    """Return once `condition()` holds; fail with `what` if it never does."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.002)


def indices(groups) -> list[int]:
    """The prompts that groups belong to."""
    return [group.prompt_index for group in groups]

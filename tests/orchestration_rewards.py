"""Reward functions for the tests of orchestration; imported by the reward processes."""

from __future__ import annotations

import itertools
import time


def share(completion, reference):
    """Fraction of the first letters that are right: has signal even for random weights."""
    answer = reference["answer"]
    hits = sum(a == b for a, b in zip(completion.text, answer, strict=False))
    return hits / len(answer) + 0.01 * len(set(completion.text))


def fails(completion, reference):
    """Raises."""
    raise ValueError("no such planet")


def not_a_number(completion, reference):
    """Returns NaN."""
    return float("nan")


def hangs_on_a(completion, reference):
    """Never comes back for answers that end in "a"."""
    while reference["answer"].endswith("a"):
        time.sleep(1)
    return share(completion, reference)


_calls = itertools.count()


def fails_in_training(completion, reference):
    """Scores the eight prompts of the first evaluation, then raises."""
    if next(_calls) >= 8:
        raise ValueError("no such moon")
    return 0.0

"""Ctrl-C in the middle of a run."""

from __future__ import annotations

import signal

import pytest

from jaxrl.orchestration.interrupts import Interrupted


def fit_until_interrupted(trainer, updates: int) -> None:
    """Run, with a SIGINT at the end of the RL update of that number."""
    update, seen = trainer._update, []

    def stop(*args):
        update(*args)
        seen.append(1)
        if len(seen) == updates:
            signal.raise_signal(signal.SIGINT)

    trainer._update = stop
    with pytest.raises(Interrupted):
        trainer.fit()

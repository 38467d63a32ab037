"""Signals end a run between two steps."""

from __future__ import annotations

import signal

import pytest

from jaxrl.orchestration.interrupts import Interrupted, Interrupts


def test_interrupts_signal_outside_a_held_section_raises_at_once():
    with Interrupts(), pytest.raises(Interrupted, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)


def test_interrupts_signal_in_a_held_section_raises_at_its_end():
    reached = []

    with Interrupts() as interrupts, pytest.raises(Interrupted) as stopped:
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            reached.append("end of the section")

    assert reached == ["end of the section"]
    assert stopped.value.signum == signal.SIGINT


def test_interrupts_second_signal_cuts_a_held_section():
    reached = []

    with Interrupts() as interrupts, pytest.raises(Interrupted):
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            reached.append("not reached")

    assert reached == []


def test_interrupts_nested_use_restores_the_handlers_of_before():
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts()

    with interrupts, interrupts:
        inside = signal.getsignal(signal.SIGINT)

    assert inside != before
    assert signal.getsignal(signal.SIGINT) == before

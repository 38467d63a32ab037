"""A driver on the tiny model, and an engine that tests can hold up or let fail."""

from __future__ import annotations

import threading
import time

from jaxrl.inference.driver import Driver


class Gate:
    """An engine that waits before chosen dispatches until the test lets it go on."""

    def __init__(self, engine, hold_at=()):
        self._engine = engine
        self._hold_at = set(hold_at)
        self.dispatches = 0
        self.reached = threading.Event()
        self.go = threading.Event()
        self.error = None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, *args, **kwargs):
        self.dispatches += 1
        if self.dispatches in self._hold_at:
            self.reached.set()
            assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return self._engine.generate(*args, **kwargs)


def until(condition) -> None:
    """Waits for `condition` to come true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def driver_of(tiny, engine=None, **options) -> Driver:
    """A driver that serves version 0 of the tiny model."""
    return Driver(engine or tiny.engine, tiny.params[0], tiny.versions[0], **options)

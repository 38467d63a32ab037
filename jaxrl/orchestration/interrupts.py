"""Orderly stops: Ctrl-C and SIGTERM end a run between two updates, never inside one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jaxrl.observe.logger import get_logger

_LOGGER = get_logger("orchestration")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class Interrupts:
    """While active (it nests), SIGINT and SIGTERM raise `Interrupted`: at once, or at the end of
    `held()`.

    A second signal raises inside a held section too, for a user who cannot wait. Only the main
    thread can handle signals; elsewhere (a notebook's worker thread) this does nothing.
    """

    def __init__(self) -> None:
        self._active = 0
        self._held = 0
        self._pending: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._active += 1
        main = threading.current_thread() is threading.main_thread()
        if main and self._active == 1:
            self._previous = {signum: signal.signal(signum, self._handle) for signum in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        self._active -= 1
        if not self._active:
            for signum, handler in self._previous.items():
                signal.signal(signum, handler)
            self._previous = {}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A section that a first signal does not cut: it raises when the section has ended."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._pending is not None and not self._held:
            signum, self._pending = self._pending, None
            raise Interrupted(signum)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Inside `held()`, a wait that a signal may cut; so does one that came before it."""
        held, self._held = self._held, 0
        try:
            if self._pending is not None:
                signum, self._pending = self._pending, None
                raise Interrupted(signum)
            yield
        finally:
            self._held = held

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._held and self._pending is None:
            self._pending = signum
            _LOGGER.warning("stopping after this step; once more to stop at once")
            return
        raise Interrupted(signum)

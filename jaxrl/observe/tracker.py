"""Gathers the metrics of a loop without ever making it wait for the device.

A step's metrics are device arrays that may not be computed yet. `Tracker.log` keeps them and
fetches those of the step before, which the device has finished by then, in one transfer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


class Writer(Protocol):
    """Takes the fetched values of one step: a file format, or the progress display."""

    def write(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        """`wall_time` is in seconds since the epoch, when the step was logged."""

    def close(self) -> None:
        """Bring everything to its destination."""


class Tracker:
    """Hands the metrics of each step to the writers, one step late.

    Several `log` calls of one step are joined into one record. Use as a context manager, or `close`
    at the end. Not thread-safe: it belongs to the thread that trains.
    """

    def __init__(self, writers: Sequence[Writer] = ()):
        self._writers = list(writers)
        self._step: int | None = None
        self._time = 0.0
        self._pending: dict[str, Any] = {}

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep scalar metrics (device arrays, NumPy or Python numbers) of `step`, an update count.

        Raises `ValueError` for a metric that is not a scalar and for a step that goes back.
        """
        for name, value in metrics.items():
            # The shape is known before the value is: looking at it does not wait.
            if np.shape(value) != ():
                raise ValueError(f"metric {name} has shape {np.shape(value)}; it must be a scalar")
        if self._step is not None and step < self._step:
            raise ValueError(f"metrics of step {step} after those of step {self._step}")
        if step != self._step:
            self.flush()
            self._step, self._time = step, time.time()
        self._pending.update(metrics)

    def flush(self) -> dict[str, float]:
        """Fetch and write what is kept; waits for the device. Returns the values."""
        if not self._pending or self._step is None:
            return {}
        import jax

        fetched = jax.device_get(self._pending)
        values = {name: float(value) for name, value in fetched.items()}
        self._pending = {}
        for writer in self._writers:
            writer.write(self._step, values, self._time)
        return values

    def close(self) -> None:
        """Write what is kept and close all writers."""
        try:
            self.flush()
        finally:
            for writer in self._writers:
                writer.close()
            self._writers = []

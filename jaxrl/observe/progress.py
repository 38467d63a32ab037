"""Shows how a run is doing: one live line on a terminal, plain lines at intervals elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from jaxrl.observe import names

COLUMNS = {
    "reward": (names.REWARD, "{:.3f}"),
    "accuracy": (names.ACCURACY, "{:.1%}"),
    "staleness": (names.STALENESS, "{:.2f}"),
    "rollout tok/s": (names.ROLLOUT_SPEED, "{:,.0f}"),
    "train tok/s": (names.TRAIN_SPEED, "{:,.0f}"),
}
"""Label -> (metric, format) of what a line shows, in order."""

_WINDOW = 16  # steps that the time left is estimated from


class Progress:
    """A `Writer` that displays; give it to the `Tracker` with the others.

    On a terminal one line is redrawn in place (rich); elsewhere a line is written at the first
    step, then at most every `interval_s` seconds, and for the last step.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        stream: TextIO | None = None,
        interval_s: float = 10.0,
        unit: str = "step",
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total = total_steps
        self._stream = stream or sys.stderr
        self._interval_s = interval_s
        self._unit = unit
        self._clock = clock
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._shown_at: float | None = None
        self._held: str | None = None
        self._latest: dict[str, float] = {}
        self._live = _start_live(self._stream) if self._stream.isatty() else None

    def write(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        """See `Writer`. A metric that a step lacks (accuracy) keeps its last value."""
        self._latest.update(values)
        now = self._clock()
        left = self._seconds_left(step, now)
        line = format_line(step, self._total, self._latest, left, unit=self._unit)
        if self._live is not None:
            self._live.update(_one_line(line))
            return
        due = self._shown_at is None or now - self._shown_at >= self._interval_s
        if due or step >= self._total:
            self._put(line)
            self._shown_at, self._held = now, None
        else:
            self._held = line

    def close(self) -> None:
        """Leave the last line standing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._held is not None:
            self._put(self._held)
            self._held = None

    def _put(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def _seconds_left(self, step: int, now: float) -> float | None:
        """From the last steps alone: the first one compiles, and phases differ in speed."""
        self._recent.append((step, now))
        first, began = self._recent[0]
        if step <= first:
            return None
        return (now - began) / (step - first) * max(0, self._total - step)


def _start_live(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.live import Live

    # rich passes what is written to stderr meanwhile (log records) above the line.
    live = Live(console=Console(file=stream), refresh_per_second=4, auto_refresh=True)
    live.start()
    return live


def _one_line(line: str) -> Any:
    from rich.text import Text

    # A line longer than the terminal is cut: two lines could not be redrawn in place.
    return Text(line, no_wrap=True, overflow="ellipsis")


def format_line(
    step: int,
    total: int,
    values: Mapping[str, float],
    seconds_left: float | None,
    *,
    unit: str = "step",
) -> str:
    """One line: steps (or another unit), the columns that have values, and the time left."""
    parts = [f"{unit} {step}/{total}"]
    parts += [
        f"{label} {form.format(values[name])}"
        for label, (name, form) in COLUMNS.items()
        if name in values
    ]
    if seconds_left is not None:
        parts.append(f"left {format_duration(seconds_left)}")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """75 -> "1m15s", 3700 -> "1h01m"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_summary(
    before: Mapping[str, float] | None, after: Mapping[str, float], *, title: str = "summary"
) -> str:
    """A table of every value measured before or after a run, with the change; of the values after
    it alone where `before` is None."""
    if before is None:
        return _table([(title, "result"), *((name, _cell(v)) for name, v in after.items())])
    rows = [(title, "before", "after", "change")]
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        change = f"{new - old:+.4g}" if old is not None and new is not None else "-"
        rows.append((name, _cell(old), _cell(new), change))
    return _table(rows)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns side by side, a line below the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])

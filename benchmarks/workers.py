"""Measurements in long-lived processes that take turns. Needs nothing but numpy and the shapes.

A worker answers each line of JSON on its standard input with one on its standard output, so that
several libraries stay loaded and compiled while their measurements alternate on one machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shapes import emit, now

FOLDER = Path(__file__).resolve().parent


class Worker:
    """A script of this folder as a process that answers questions one at a time."""

    def __init__(self, python: str, *command: str, **environment: str) -> None:
        paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        script = str(FOLDER / command[0])
        self._process = subprocess.Popen(
            [python, script, *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def ask(self, **question: object) -> dict:
        """The answer to one question. Raises SystemExit if the process has ended."""
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args[1]} ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def answer(work: Callable[..., dict]) -> None:
    """Be a worker: `work` gets each question as keyword arguments."""
    for line in sys.stdin:
        emit(work(**json.loads(line)))


def timed(work: Callable[[], object]) -> tuple[object, dict[str, float]]:
    """What `work` returns, and the CPU and wall seconds that it took."""
    begin = now()
    result = work()
    cpu, wall = (b - a for a, b in zip(begin, now(), strict=True))
    return result, {"cpu": cpu, "wall": wall}


def medians(records: list[dict[str, float]], digits: int = 3) -> dict[str, float]:
    """The median of each number over the records."""
    return {n: round(statistics.median(r[n] for r in records), digits) for n in records[0]}


def ratios(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, list[float]]:
    """By how much the others take longer, pair by pair: [lowest, median, highest]."""
    result = {}
    for name in ours[0]:
        each = sorted(b[name] / a[name] for a, b in zip(ours, theirs, strict=True))
        result[name] = [round(x, 2) for x in (each[0], statistics.median(each), each[-1])]
    return result

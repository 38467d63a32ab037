"""Starts real Python processes that are one job on this machine, for the tests of jobs."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
KILL_AFTER_S = 600.0
"""Generous: a process that runs longer than this hangs, however slow the machine is."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended: `code` is its exit code, negative for a signal, None if killed here."""

    code: int | None
    out: str
    err: str

    @property
    def text(self) -> str:
        """All that it wrote."""
        return self.out + self.err


class Job:
    """`count` processes of `worker SCENARIO …`; as a context, none of them outlives it."""

    def __init__(
        self,
        folder: Path,
        scenario: str,
        count: int = 2,
        *,
        options: Sequence[str] = (),
        ids: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
        devices: int = 1,
        port: int = 0,
        worker: str = "distributed/worker.py",
    ):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        port = port or free_port()
        ids = range(count) if ids is None else ids
        counts = [count] * len(ids) if counts is None else counts
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))},
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS), *sys.path]),
            "OMP_NUM_THREADS": "1",
        }
        self._processes = []
        for place, (index, expected) in enumerate(zip(ids, counts, strict=True)):
            command = [
                sys.executable,
                TESTS / worker,
                scenario,
                str(port),
                str(expected),
                str(index),
            ]
            command += [str(folder), *options]
            paths = (self._path(place, kind) for kind in ("out", "err"))
            with next(paths).open("wb") as out, next(paths).open("wb") as err:
                process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
            self._processes.append(process)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()

    def signal(self, place: int, signum: int) -> None:
        """Send a signal to one process."""
        self._processes[place].send_signal(signum)

    def wait_for(self, word: str, places: Sequence[int], kind: str = "out") -> None:
        """Wait until each of these processes has written `word`."""
        self._until(
            lambda: all(word in self.read(place, kind) for place in places), f"{word!r} in {kind}"
        )

    def ended(self, places: Sequence[int] | None = None) -> list[Ended]:
        """Wait until these processes (None: all) end; those that do not are killed."""
        places = range(len(self._processes)) if places is None else places
        deadline = time.monotonic() + KILL_AFTER_S
        results = []
        for place in places:
            process = self._processes[place]
            try:
                code = process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
            results.append(Ended(code, self.read(place, "out"), self.read(place, "err")))
        return results

    def read(self, place: int, kind: str) -> str:
        """What a process has written so far: "out" or "err"."""
        return self._path(place, kind).read_text(encoding="utf-8", errors="replace")

    def _path(self, place: int, kind: str) -> Path:
        return self.folder / f"{place}.{kind}"

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + KILL_AFTER_S
        while not condition():
            if all(process.poll() is not None for process in self._processes):
                deadline = min(deadline, time.monotonic() + 20)  # others may still write
            if time.monotonic() > deadline:
                texts = [
                    self.read(p, k) for p in range(len(self._processes)) for k in ("out", "err")
                ]
                raise AssertionError(f"no {what}:\n" + "\n".join(texts))
            time.sleep(0.02)


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run(folder: Path, scenario: str, count: int = 2, **options: object) -> list[Ended]:
    """Run a job to its end."""
    with Job(folder, scenario, count, **options) as job:  # type: ignore[arg-type]
        return job.ended()

"""Speaks for a process that can no longer speak: killed, out of memory, ended by JAX itself.

A small child that is told what its parent sees. When the parent ends without a word, the child
writes the last of it to stderr and to the folder of the logs. It needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path

_MOST_BYTES = 1 << 16


class Witness:
    """Handle of the child."""

    def __init__(self, name: str):
        self._name = name
        self._process = subprocess.Popen(
            # No site packages, no environment, no folder to import from: it starts at once.
            [sys.executable, "-S", "-E", "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def tell(self, text: str, file: Path | None) -> None:
        """What to say if nothing else comes."""
        record = {"name": self._name, "text": text[:_MOST_BYTES], "file": str(file or "")}
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(record).encode() + b"\n")
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """The process speaks for itself; the child ends."""
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            assert self._process.stdin is not None
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
            self._process.wait(timeout=5)


def _watch() -> None:
    parent, last, rest = os.getppid(), b"", b""
    # The end of stdin does not tell all: other children of the parent may hold the pipe open.
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], 0.5)
        if readable:
            data = os.read(0, 1 << 20)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            last = lines[-1] if lines else last
    if last:
        _say(json.loads(last))


def _say(record: dict[str, str]) -> None:
    text = f"jaxrl: error: {record['name']} has ended without a word; last seen: {record['text']}\n"
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
    if record["file"]:
        with contextlib.suppress(OSError), open(record["file"], "a", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    _watch()

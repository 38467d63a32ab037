"""Kills a process in the middle of a write, for the tests of what that leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def kill_when_exists(code: str, argument: Path, watched: Path) -> None:
    """Run Python `code` with `argument` in a process; SIGKILL it as soon as `watched` exists.

    Returns too when the process ends by itself or nothing appears for two minutes: the caller
    asserts what it needs to find.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", code, str(argument)], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not watched.exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        child.kill()
        child.wait()

"""What the tests of the pool share: completions, waiting, and whether a process is gone."""

from __future__ import annotations

import asyncio
import sys
import time

import numpy as np
import pytest

from jaxrl.types import Completion

LIMIT_S = 1.0
PATIENCE_S = 60.0
"""How long a test waits for something that must come about; not a limit on how fast it is."""


def said(text):
    return Completion(
        np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", text
    )


def score(pool, *texts, reference=None):
    """Results of several completions that are scored at the same time."""

    async def run():
        return await asyncio.gather(*(pool.score(said(t), reference or {}) for t in texts))

    return asyncio.run(run())


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def is_gone(pid):
    """Whether no process has this id, or only one that its parent has not collected yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

"""The TPU compiler in tests: skipped without it, and otherwise in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxrl.planning.tpu_environment import ENVIRONMENT, available


def need_tpu_compiler() -> None:
    """Skip the test where there is no TPU compiler."""
    if not available():
        pytest.skip("needs the TPU compiler: the extra `tpu-compile`, or TPU_LIBRARY_PATH")


def report_of(script: Path) -> Any:
    """What `script`, which compiles for a slice, prints as JSON in its last line."""
    need_tpu_compiler()
    path = os.pathsep.join(sys.path)
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    # Limits of memory hold for programs that are optimised as those that run.
    env.pop("JAX_OPTIMIZATION_LEVEL", None)
    result = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])

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


def need_tpu_compiler() -> dict[str, str]:
    """Variables for a process that compiles; skips the test where there is no TPU compiler."""
    library = os.environ.get("JAXRL_TEST_LIBTPU", "")
    if os.path.isfile(library):
        return {"TPU_LIBRARY_PATH": library}
    if not available():
        pytest.skip(
            "needs the TPU compiler: `make test`, the extra `tpu-compile`, or TPU_LIBRARY_PATH"
        )
    return {}


def report_of(script: Path) -> Any:
    """What `script`, which compiles for a slice, prints as JSON in its last line."""
    library = need_tpu_compiler()
    path = os.pathsep.join(sys.path)
    env = {**os.environ, **ENVIRONMENT, **library, "PYTHONPATH": path}
    # Limits of memory hold for programs that are optimised as those that run.
    env.pop("JAX_OPTIMIZATION_LEVEL", None)
    result = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])

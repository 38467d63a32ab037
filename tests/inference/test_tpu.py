"""The engine's programs on a TPU slice, checked with the TPU compiler on a machine without one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@pytest.mark.slow
def test_programs_for_a_slice_split_the_cache_donate_it_and_never_gather_it():
    if not (os.environ.get("TPU_LIBRARY_PATH") or importlib.util.find_spec("libtpu")):
        pytest.skip("needs the TPU compiler: pip install libtpu, or TPU_LIBRARY_PATH")
    script = Path(__file__).with_name("tpu_programs.py")

    result = subprocess.run(
        [sys.executable, script],
        env={**os.environ, **_TPU, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )

    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout.splitlines()[-1])
    cache, programs = report["cache_bytes"] // 16, report["programs"]
    for name in ("copy", "spread", "generate"):
        assert programs[name]["donated"] >= cache, name
    # A sixteenth of the cache, a quarter of the weights (heads and vocabulary; norms are whole).
    assert programs["generate"]["arguments"] <= cache + report["param_bytes"] // 4 + 2**20
    for name, program in programs.items():
        # Keys of one layer are a quarter of the cache: twice this. Blocks of one slot are small.
        assert program["largest_collective"] < cache // 8, name
        assert program["temporary"] < cache // 2, name

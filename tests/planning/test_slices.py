"""The large runs of configs/slices: planned here, compiled for their slices in slow tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tpu_compiler import need_tpu_compiler

from jaxrl.config.files import load_config_file
from jaxrl.planning.chips import parse_topology
from jaxrl.planning.layout import make_layout
from jaxrl.planning.memory import plan_memory

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "slices").glob("*.py"), key=str)
FACTOR = 2.0


def topology_of(path: Path) -> str:
    return re.search(r"--topology=(\S+)", path.read_text()).group(1)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_large_run_is_planned_to_fit_its_slice(path):
    topology = parse_topology(topology_of(path))

    layout = make_layout(load_config_file(path), topology.n_devices)

    plan = plan_memory(layout, kernel=True)
    assert 0.1 * topology.chip.hbm_bytes < plan.peak < topology.chip.hbm_bytes


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_large_run_compiles_for_its_slice_fits_and_needs_about_what_was_planned(path, repo_root):
    library = need_tpu_compiler()
    command = [sys.executable, "-m", "jaxrl", "compile", "--json"]
    env = {**os.environ, **library, "PYTHONPATH": str(repo_root)}
    env.pop("JAX_OPTIMIZATION_LEVEL", None)  # as programs that run are compiled

    done = subprocess.run(
        [*command, f"--config={path}", f"--topology={topology_of(path)}"],
        env=env, capture_output=True, text=True,
    )  # fmt: skip

    if "cannot read the program of this libtpu" in done.stderr:
        pytest.skip("needs the libtpu that goes with this jaxlib: the extra `tpu-compile`")
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(done.stdout)
    train, _, decode = record["programs"]
    assert record["fits"] is True
    # Long rows have much attention, and buckets of experts half as much room again.
    assert 1 < train["flops_over_model"] < 3
    assert train["utilisation_at_most"] > 0.3
    assert decode["memory_bytes"]["aliased"] > 0.9 * decode["memory_bytes"]["outputs"]
    topology = parse_topology(topology_of(path))
    plan = plan_memory(make_layout(load_config_file(path), topology.n_devices), kernel=True)
    ratio = sum(plan.programs["train"].values()) / train["memory_bytes"]["temporary"]
    assert 1 / FACTOR < ratio < FACTOR

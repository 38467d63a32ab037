"""`jaxrl plan` and `jaxrl compile` as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tpu_compiler import need_tpu_compiler

from jaxrl.cli import main as cli

CONFIG = "configs/tiny.py"


@pytest.fixture
def jaxrl(capfd, repo_root, monkeypatch):
    """Function (arguments…) -> (exit code, standard output, standard error), in this process."""
    monkeypatch.chdir(repo_root)

    def run(*arguments):
        code = cli.main(list(arguments))
        return code, *capfd.readouterr()

    return run


def test_plan_of_a_run_that_fits_says_so_and_exits_0(jaxrl):
    code, out, err = jaxrl("plan", f"--config={CONFIG}", "--topology=v5e:2x2")

    assert (code, err) == (0, "")
    assert out.startswith("tiny on v5e:2x2 (data=4): 21,760 weights, 8 rows of 128 tokens")
    assert "optimizer state" in out
    assert "KV cache" in out
    assert out.splitlines()[-1].startswith("fits: ")


def test_plan_of_a_run_that_does_not_fit_exits_1_and_names_both_sizes(jaxrl):
    sizes = ("--config.model.d_model=8192", "--config.model.n_layers=20")

    code, out, _ = jaxrl("plan", f"--config={CONFIG}", *sizes, "--devices=1", "--hbm-gb=4")

    assert code == 1
    assert "DOES NOT FIT: " in out.splitlines()[-1]
    assert "of 4.00 GiB" in out.splitlines()[-1]


def test_plan_json_has_the_bytes_of_each_part_and_their_peak(jaxrl):
    code, out, _ = jaxrl("plan", f"--config={CONFIG}", "--devices=4", "--json")

    record = json.loads(out)
    programs = record["program_bytes"]
    assert code == 0
    assert record["fits"] is None
    assert record["mesh"] == {"data": 4}
    assert set(programs) == {"train", "publish", "prefill", "decode"}
    most = max(sum(parts.values()) for parts in programs.values())
    assert record["peak_bytes"] == sum(record["resident_bytes"].values()) + most


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "mesh.data=-1 takes the rest of the devices: say how many there are with --topology"),
        (["--topology=v5e:99x99"], "topology 'v5e:99x99': sizes must be from 1 to those of a pod"),
        (["--topology=v9:2x2"], "there is no chip 'v9'"),
        (["--topology=v5e:2x2", "--devices=4"], "--devices=4 cannot go with --topology=v5e:2x2"),
        (["--devices=0"], "--devices=0 must be at least 1"),
        (["--devices=1", "--hbm-gb=1e308"], "--hbm-gb=1e+308 must be between 0.001 and 1048576"),
        (["--devices=1", "--hbm-gb=-1"], "--hbm-gb=-1.0 must be between 0.001 and 1048576"),
        (["--devices=1", "--hbm-gb=1e-300"], "--hbm-gb=1e-300 must be between 0.001 and 1048576"),
        (["--devices=3"], "slots=8 must be a multiple of data=3"),
        (["--devices=8", "--config.mesh.tensor=3"], "mesh.tensor=3 must be a divisor of model.n_h"),
        (
            ["--devices=8", "--config.mesh.data=3"],
            "mesh: data=3 (product 3) must multiply",
        ),
    ],
)
def test_plan_impossible_request_exits_2_with_one_line(jaxrl, arguments, message):
    code, out, err = jaxrl("plan", f"--config={CONFIG}", *arguments)

    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_plan_without_data_tokenizer_or_weights_needs_none_of_them(jaxrl, tmp_path):
    code, _, err = jaxrl(
        "plan", f"--config={CONFIG}", "--devices=1", "--config.model.vocab_size=1000",
        f"--config.data.tokenizer={tmp_path}/none.json", "--config.data.source=jsonl",
        f"--config.data.path={tmp_path}/none.jsonl", "--config.data.task=",
        "--config.data.task_options={}", f"--config.model.weights={tmp_path}/none",
    )  # fmt: skip

    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=v5e:5x5"], "hosts have 2x2 chips"),
        (["--topology=v5e:2x2", "--programs=train,sample"], "--programs=('train', 'sample') must"),
        (["--topology=v5e:2x2", "--programs=()"], "--programs is empty"),
        ([], "--topology is required"),
    ],
)
def test_compile_impossible_request_exits_2_with_one_line(jaxrl, arguments, message):
    code, out, err = jaxrl("compile", f"--config={CONFIG}", *arguments)

    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_compile_without_the_compiler_says_how_to_install_it(jaxrl, monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    code, _, err = jaxrl("compile", f"--config={CONFIG}", "--topology=v5e:2x2")

    assert code == 2
    assert "pip install 'jaxrl[tpu-compile]'" in err


def test_compile_with_a_library_that_is_not_there_names_it(jaxrl, monkeypatch):
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/nowhere/libtpu.so")

    code, _, err = jaxrl("compile", f"--config={CONFIG}", "--topology=v5e:2x2")

    assert (code, err.count("\n")) == (2, 1)
    assert "TPU_LIBRARY_PATH=/nowhere/libtpu.so: there is no such file" in err


def run_compile(repo_root, *arguments):
    """A process of its own: the compiler's settings are read when jax is imported."""
    library = need_tpu_compiler()
    env = {**os.environ, **library, "PYTHONPATH": str(repo_root), "JAX_OPTIMIZATION_LEVEL": "O1"}
    command = [sys.executable, "-m", "jaxrl", "compile", *arguments]
    return subprocess.run(command, cwd=repo_root, env=env, capture_output=True, text=True)


def test_compile_for_a_small_slice_reports_memory_operations_traffic_and_time(repo_root):
    axes = ("--config.mesh.data=1", "--config.mesh.fsdp=2", "--config.mesh.tensor=2")
    sizes = {
        "n_layers": 1, "n_kv_heads": 2, "vocab_size": 512, "d_model": 256, "head_dim": 128,
        "mlp_dim": 1024,
    }  # fmt: skip
    model = [f"--config.model.{name}={size}" for name, size in sizes.items()]

    done = run_compile(
        repo_root, f"--config={CONFIG}", "--topology=v5e:2x2", *axes, *model, "--json",
        "--programs=train",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(done.stdout)
    (train,) = record["programs"]
    memory = train["memory_bytes"]
    assert record["fits"] is True
    assert (record["devices"], record["mesh"]) == (4, {"fsdp": 2, "tensor": 2})
    # Attention is no part of 6ND: more, but not several times as much.
    assert 1 < train["flops_over_model"] < 2
    assert {"all-gather", "reduce-scatter"} <= set(train["collectives"])
    # The state is changed in place.
    assert memory["aliased"] > 0.8 * memory["outputs"] > 0
    assert 0 < train["fastest_s"] <= train["slowest_s"]


@pytest.mark.slow
def test_compile_of_what_the_chip_cannot_hold_exits_1_with_one_line_and_the_numbers(repo_root):
    sizes = ("--config.model.d_model=8192", "--config.model.mlp_dim=65536")

    done = run_compile(
        repo_root, f"--config={CONFIG}", "--topology=v5e:1x1", *sizes, "--programs=train",
        "--config.model.n_layers=8", "--config.model.scan_layers",
    )  # fmt: skip

    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "train does not compile for v5e:1x1: it needs" in last
    assert "of HBM, the chip has 15.75GiB" in last

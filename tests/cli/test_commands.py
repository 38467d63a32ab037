"""The commands as a user runs them: real processes, a tiny run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

CONFIG = """
from jaxrl.config import (
    CheckpointConfig, DataConfig, EvalConfig, ExperimentConfig, ModelConfig, ObserveConfig,
    RolloutConfig, SFTConfig, TrainConfig,
)


def get_config():
    return ExperimentConfig(
        output_dir="run",
        model=ModelConfig(
            n_layers=1, d_model=16, n_heads=2, n_kv_heads=1, head_dim=8, mlp_dim=32, max_length=16
        ),
        data=DataConfig(
            source="jsonl", path="questions.jsonl", train_size=20, eval_size=5, max_prompt_tokens=8
        ),
        sft=SFTConfig(steps=2, batch_size=4),
        train=TrainConfig(steps=3, batch_size=8),
        rollout=RolloutConfig(group_size=4, max_new_tokens=4, slots=8, steps_per_dispatch=4),
        eval=EvalConfig(size=5),
        checkpoint=CheckpointConfig(every=1),
        observe=ObserveConfig(tensorboard=False),
    )
"""


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    rows = [{"question": f"{i}=", "answer": str(i)[::-1]} for i in range(10, 40)]
    (tmp_path / "questions.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path


@pytest.fixture
def jaxrl(workdir, repo_root):
    """Function (arguments…) -> the finished process, run in `workdir`."""
    env = {**os.environ, "PYTHONPATH": str(repo_root)}
    env.pop("XLA_FLAGS", None)

    def run(*arguments, wait=True):
        command = [sys.executable, "-m", "jaxrl", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=workdir, env=env, **pipes)
        if not wait:
            return process
        out, err = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return run


def test_train_then_eval_and_generate_work_on_what_the_run_left(jaxrl, workdir):
    trained = jaxrl("train", "--config=config.py")
    evaluated = jaxrl("eval", "--run=run")
    generated = jaxrl("generate", "12=", "--run=run")

    assert trained.returncode == 0, trained.stderr
    assert "before" in trained.stdout
    assert "eval/accuracy" in trained.stdout
    assert "step 5/5" in trained.stderr
    assert (workdir / "run" / "plots" / "metrics.png").exists()
    assert evaluated.returncode == 0, evaluated.stderr
    record = json.loads(evaluated.stdout)
    assert record["version"] == 5
    assert record["prompts"] == 5
    assert generated.returncode == 0, generated.stderr
    assert "v5:" in generated.stderr


def test_convert_writes_a_folder_that_a_new_run_starts_from(jaxrl, workdir):
    assert jaxrl("train", "--config=config.py").returncode == 0

    converted = jaxrl("convert", "--run=run", "--to=published")
    again = jaxrl("convert", "--run=run", "--to=published")
    started = jaxrl(
        "train",
        "--config=config.py",
        "--config.model.weights=published",
        "--config.data.tokenizer=published",
        "--config.sft.steps=0",
        "--config.train.steps=1",
        "--config.output_dir=second",
    )

    assert (converted.returncode, converted.stdout) == (0, "published\n"), converted.stderr
    assert "v5:" in converted.stderr
    assert again.returncode == 1
    assert "published already holds config.json; choose another --to" in again.stderr
    assert started.returncode == 0, started.stderr
    # Version 0 of the new run is version 5 of the old one.
    digests = [
        json.loads((workdir / path / "stamp" / "metadata").read_text())["digest"]
        for path in ("run/weights/5", "second/weights/0")
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_train_interrupted_saves_a_checkpoint_and_goes_on(jaxrl, workdir, signum, code):
    process = jaxrl("train", "--config=config.py", "--config.train.steps=100000", wait=False)
    for line in process.stderr:
        if "checkpoint at version 4" in line:
            break
    process.send_signal(signum)
    _, rest = process.communicate()
    reached = max(int(path.name) for path in (workdir / "run" / "checkpoints").iterdir())

    resumed = jaxrl("train", "--config=config.py", f"--config.train.steps={reached - 2 + 1}")

    assert process.returncode == code, rest
    assert f"stopped by {signum.name}" in rest
    assert "Traceback" not in rest
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed rl at v{reached}:" in resumed.stderr
    assert json.loads(jaxrl("eval", "--run=run").stdout)["version"] == reached + 1


def test_signal_while_importing_ends_the_process_with_one_line():
    code = (
        "import os, signal, time\n"
        "from jaxrl.cli import main\n"
        "with main._signals_end_the_process():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (result.returncode, result.stderr) == (143, "jaxrl: error: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.output_dir=config.py/run"], "config.py/run"),
        (["--config.rollout.slots=0"], "rollout.slots"),
        (["--config.data.path=missing.jsonl"], "missing.jsonl"),
        (["--config.mesh.data=3"], "mesh: "),
        (["--config.model.vocab_size=5"], "model.vocab_size=5 must be 0 or at least 99"),
        (["--config.rewards.scorer=no_such_module:score"], "no_such_module"),
    ],
)
def test_train_mistake_of_the_user_is_one_line_and_exit_code_not_zero(jaxrl, arguments, message):
    result = jaxrl("train", "--config=config.py", "--config.sft.steps=0", *arguments)

    assert result.returncode in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr

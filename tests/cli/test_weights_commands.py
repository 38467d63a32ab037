"""`generate` and `eval` on published weights: in this process, and as a user runs them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys

import pytest

from jaxrl.config import ModelConfig
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.models.model import build_model, init_params
from jaxrl.models.safetensors import save_params
from jaxrl.weights.digest import compute_digest

LAST = 2**31 - 1  # of the seeds
CONFIG = ModelConfig(
    n_layers=2,
    d_model=16,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    mlp_dim=32,
    vocab_size=259,
    max_length=64,
)


def _save(folder, **changes):
    """A model whose greedy text goes on to its limit, and its digest."""
    built = build_model(dataclasses.replace(CONFIG, **changes))
    params = init_params(built, 3)
    # A zero is never the largest of 259 logits: no end-of-sequence token.
    params["embedding"] = params["embedding"].at[2].set(0.0)
    save_params(folder, built, params)
    load_tokenizer("bytes").save(folder)
    return compute_digest(params)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(folder with a tiny random model and the tokenizer "bytes", digest of the weights)."""
    folder = tmp_path_factory.mktemp("published") / "tiny"
    return folder, _save(folder)


@pytest.fixture(scope="module")
def model(published):
    return published[0]


@pytest.fixture(scope="module")
def digest(published):
    return published[1]


@pytest.fixture
def questions(tmp_path):
    """Five questions in the form of GSM8K."""
    rows = [{"question": f"{i} + 1?", "answer": f"so\n#### {i + 1:,}"} for i in range(998, 1003)]
    path = tmp_path / "questions.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    return path


@pytest.fixture
def start(repo_root):
    """Function (arguments…) -> a running process."""
    env = {**os.environ, "PYTHONPATH": str(repo_root), "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    started = []

    def run(*arguments, **options):
        command = [sys.executable, "-m", "jaxrl", *map(str, arguments)]
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, **options)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def test_generate_prints_the_completion_and_what_it_took_and_writes_nothing(
    jaxrl, model, digest, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    code, text, log = jaxrl("generate", "Hi", "--weights", model, "--max-new-tokens=8")
    again = jaxrl("generate", "Hi", f"--weights={model}", "--max-new-tokens=8", "--seed=5")

    assert code == 0, log
    assert text.endswith("\n")
    assert again[1] == text  # greedy
    assert f"weights v0:{digest[:12]}" in log
    assert "prompt 2 tokens, generated 8 (length), first token after" in log
    assert log.rstrip().endswith("tokens/s")
    assert list(tmp_path.iterdir()) == []
    assert {path.suffix for path in model.iterdir()} == {".json", ".safetensors"}


def test_generate_several_completions_differ_and_are_those_of_their_seeds(jaxrl, model):
    flags = ["--weights", model, "--max-new-tokens=8", "--temperature=1"]

    code, both, log = jaxrl("generate", "Hi", *flags, "--n=2", "--seed=4")
    first = jaxrl("generate", "Hi", *flags, "--seed=4")[1]
    second = jaxrl("generate", "Hi", *flags, "--seed=5")[1]

    assert code == 0, log
    assert both == first + second
    assert first != second
    assert "generated 16 (length, length)" in log


def test_generate_without_a_length_fills_what_the_model_has_left(jaxrl, model):
    code, _, log = jaxrl("generate", "x" * 60, "--weights", model)

    assert code == 0, log
    assert "prompt 60 tokens, generated 4 (length)" in log


def test_generate_raw_text_may_hold_special_tokens(jaxrl, model):
    flags = ["--weights", model, "--max-new-tokens=8"]

    assert "prompt 7 tokens" in jaxrl("generate", "<eos>Hi", *flags)[2]
    assert "prompt 3 tokens" in jaxrl("generate", "<eos>Hi", *flags, "--raw")[2]


def test_eval_prints_counts_and_writes_predictions(jaxrl, model, digest, questions, tmp_path):
    file = tmp_path / "out.jsonl"
    flags = ["--weights", model, "--data", questions, "--max-new-tokens=8", "--size=4"]

    code, out, log = jaxrl("eval", *flags, "--answer-format=gsm8k", f"--predictions={file}")

    assert code == 0, log
    record = json.loads(out)
    # A model evaluated and a model that generates are one version, scanned or not.
    assert (record["version"], record["digest"]) == (0, digest)
    assert (record["prompts"], record["correct"], record["eval/accuracy"]) == (4, 0, 0.0)
    assert record["scorer"] == "last_number"
    assert record["tokens_per_second"] > 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [f"{i} + 1?" for i in range(998, 1002)]
    assert [line["answer"] for line in lines] == ["999", "1000", "1001", "1002"]
    assert sum(line["finish_reason"] == "length" for line in lines) == record["truncated"]
    assert [[line["prompt"], line["completion"], line["score"]] for line in lines] == record[
        "examples"
    ]
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_eval_predictions_file_that_exists_is_kept_and_named(jaxrl, model, questions, tmp_path):
    file = tmp_path / "out.jsonl"
    file.write_text("mine")

    code, out, log = jaxrl("eval", "--weights", model, "--data", questions, "--predictions", file)

    assert (code, out, file.read_text()) == (1, "", "mine")
    assert f"--predictions={file} exists already" in log


LONG = ["--max-new-tokens=9000", "--config.observe.compilation_cache=off"]
SCORERS = """
import time

def one(completion, reference):
    return 1.0

def hang(completion, reference):
    if reference["answer"] == "1,000":
        time.sleep(3600)
    return 1.0
"""


def test_eval_counts_what_is_right_and_what_ran_out_of_time(
    jaxrl, model, questions, tmp_path, monkeypatch
):
    (tmp_path / "eval_scorers.py").write_text(SCORERS)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--weights", model, "--data", questions, "--max-new-tokens=8"]

    right = json.loads(jaxrl("eval", *flags, "--scorer=eval_scorers:one")[1])
    hung = jaxrl("eval", *flags, "--scorer=eval_scorers:hang", "--config.rewards.timeout_s=1")

    assert (right["prompts"], right["correct"], right["eval/accuracy"]) == (5, 5, 1.0)
    assert hung[0] == 0, hung[2]
    record = json.loads(hung[1])
    assert (record["correct"], record["eval/timeouts"]) == (4, 1.0)
    # null, as JSON knows no NaN.
    assert [score for _, _, score in record["examples"]] == [1.0, None, 1.0, 1.0, 1.0]


def test_eval_reference_that_the_scorer_cannot_read_ends_it_with_the_prompt(jaxrl, model, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": "seven"}')

    code, _, log = jaxrl("eval", "--weights", model, "--data", path, "--max-new-tokens=8")

    assert code == 1
    assert "scoring prompt eval/e0/00000 failed: ValueError: the reference answer 'seven'" in log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi"], "exactly one of --run and --weights must be given; neither"),
        (["generate", "hi", "--run=a", "--weights=b"], "must be given; both are given"),
        (["eval", "--run=a", "--weights=b", "--data=c"], "must be given; both are given"),
        (["eval"], "exactly one of --run and --weights must be given; neither is given"),
        (["eval", "--weights={model}"], "--weights needs --data=FILE.jsonl"),
        (["generate", "hi", "--weights={model}", "--version=3"], "--version=3 belongs to --run"),
        (["generate", "hi", "--run=a", "--max-length=9"], "--max-length=9 belongs to --weights"),
        (["generate", "hi", "--weights=missing"], "missing does not exist: it must be a folder"),
        (["generate", "hi", "--weights={empty}"], "config.json"),
        (["generate", "hi", "--weights={model}", "--max-length=65"], "must be at most 64"),
        (["generate", "hi", "--weights={model}", "--max-new-tokens=64"], "must be below 64"),
        (["generate", "hi", "--weights={model}", "--n=2"], "--n=2 must be 1 when sampling is gree"),
        (["generate", "hi", "--weights={model}", "--temperature=-1"], "--temperature=-1"),
        (["generate", "hi", "--weights={model}", "--n=1000000000"], "must be between 1 and 1000"),
        (
            [
                "generate",
                "hi",
                "--weights={model}",
                "--temperature=1",
                "--n=2",
                f"--seed={2**31 - 1}",
            ],
            "--seed=2147483647 must be at most 2147483646",
        ),
        (["generate", "{long}", "--weights={model}"], "prompt of 70 tokens + 1 new ones = 71 is"),
        (
            ["eval", "--weights={model}", "--data=missing.jsonl"],
            "--data=missing.jsonl: there is no such file",
        ),
        (["eval", "--weights={model}", "--data={bad}"], "bad.jsonl:2: not a JSON record"),
        (["eval", "--weights={model}", "--data={plain}", "--size=2"], "--size=2 must be at most 1"),
        (
            ["eval", "--weights={model}", "--data={plain}", "--answer-format=gsm8k"],
            "plain.jsonl:1: 'answer' must hold ####",
        ),
        (
            ["eval", "--weights={model}", "--data={plain}", "--max-new-tokens=60"],
            "the prompt of example 0 has 6 tokens, more than max_prompt_tokens=4",
        ),
        (["eval", "--weights={model}", "--data={plain}", "--scorer=exat"], "did you mean 'exact'"),
        (["eval", "--run=a", "--answer-format=gsm8k"], "--answer-format=gsm8k needs --data"),
    ],
    ids=lambda value: value[-1][:40] if isinstance(value, list) else "",
)
def test_mistake_is_one_line_and_exit_code_2(jaxrl, model, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "bad.jsonl").write_text('{"question": "q", "answer": "2"}\n{"question"\n')
    places = {
        "model": model,
        "empty": tmp_path / "empty",
        "plain": tmp_path / "plain.jsonl",
        "bad": tmp_path / "bad.jsonl",
        "long": "x" * 70,
    }

    code, out, log = jaxrl(*(argument.format(**places) for argument in arguments))

    assert (code, out) == (2, ""), log
    assert message in log
    assert log.count("\n") == 1


def test_tokenizer_larger_than_the_embedding_is_refused_before_the_weights_are_read(
    jaxrl, tmp_path
):
    small = build_model(dataclasses.replace(CONFIG, vocab_size=100))
    save_params(tmp_path, small, init_params(small, 0))
    load_tokenizer("bytes").save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")

    code, _, log = jaxrl("generate", "hi", "--weights", tmp_path)

    assert code == 2
    assert "model.vocab_size=100 must be 0 or at least 259, the ids of data.tokenizer" in log


def test_weights_that_are_damaged_are_an_error_that_names_the_file(jaxrl, model, tmp_path):
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"damaged")

    code, out, log = jaxrl("generate", "hi", "--weights", tmp_path)

    assert (code, out) == (1, "")
    assert "model.safetensors" in log


def test_generate_streams_and_ends_quietly_when_the_reader_leaves(start, tmp_path):
    _save(tmp_path / "long", max_length=10_000)
    process = start("generate", "Hi", "--weights", tmp_path / "long", *LONG, stdout=-1)

    first = process.stdout.read(1)
    running = process.poll() is None
    process.stdout.close()
    errors = process.stderr.read().decode()

    assert first
    assert running  # it came before the end
    assert process.wait(120) == 0, errors
    assert "Traceback" not in errors
    assert "generated" not in errors  # the rest was not decoded


def test_generate_ctrl_c_ends_at_once_with_130(start, tmp_path):
    _save(tmp_path / "long", max_length=10_000)
    process = start("generate", "Hi", "--weights", tmp_path / "long", *LONG, stdout=-1)
    process.stdout.read(1)

    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()

    assert process.returncode == 130, errors
    assert errors.decode().splitlines()[1:] == ["jaxrl: error: interrupted"]


def test_generate_model_with_many_stop_tokens_answers(jaxrl, tmp_path):
    _save(tmp_path)
    stops = list(range(2, 22))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))

    code, _, log = jaxrl("generate", "hi", "--weights", tmp_path, "--max-new-tokens=2")

    assert code == 0, log
    assert "prompt 2 tokens, generated" in log

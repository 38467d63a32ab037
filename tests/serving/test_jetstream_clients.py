"""Clients that others wrote: the published stubs, and the published benchmark, both unmodified."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from serving.grpc_setup import PROMPT, gathered, ids, serving

from jaxrl.inference.engine import Engine
from jaxrl.serving import protocol
from jaxrl.types import SamplingParams

PACKAGE = "google-jetstream 0.2.2 (the extra `jetstream`)"


def _stubs():
    reason = f"needs the generated stubs of {PACKAGE}"
    messages = pytest.importorskip("jetstream.core.proto.jetstream_pb2", reason=reason)
    calls = pytest.importorskip("jetstream.core.proto.jetstream_pb2_grpc", reason=reason)
    return messages, calls


@pytest.mark.asyncio
async def test_published_stubs_work_in_the_process_of_the_server(tiny):
    messages, calls = _stubs()
    request = messages.DecodeRequest(
        token_content=messages.DecodeRequest.TokenContent(token_ids=PROMPT), max_tokens=12
    )

    with tiny.driver() as driver:
        async with serving(driver, stop_ids=()) as (_, channel):
            stub = calls.OrchestratorStub(channel)
            live = await stub.HealthCheck(messages.HealthCheckRequest())
            responses = [response async for response in stub.Decode(request)]

    assert live.is_live
    assert messages.DecodeRequest is not protocol.DecodeRequest
    tokens = gathered(responses)
    assert len(tokens) == 12
    text = "".join(response.stream_content.samples[0].text for response in responses)
    assert text == tiny.tokenizer.decode(tokens)


@pytest.mark.asyncio
async def test_fields_of_ours_pass_through_published_stubs_as_unknown(tiny):
    messages, calls = _stubs()
    ours = protocol.DecodeRequest(token_content=ids(*PROMPT), max_tokens=12, seed=8)
    theirs = messages.DecodeRequest.FromString(ours.SerializeToString())

    with tiny.driver() as driver:
        expected = driver.sample_blocking(np.array(PROMPT), SamplingParams(12, seed=8))
        async with serving(driver, stop_ids=()) as (_, channel):
            stub = calls.OrchestratorStub(channel)
            responses = [response async for response in stub.Decode(theirs)]

    assert gathered(responses) == expected.tokens.tolist()
    again = [protocol.DecodeResponse.FromString(r.SerializeToString()) for r in responses]
    assert gathered(again, field="weight_versions") == [0] * 12


PROMPTS = 200


def _benchmark() -> Path:
    """The path of their benchmark; skips with the first package that it lacks."""
    _stubs()
    for name in ("pandas", "nltk", "evaluate", "seqio", "sentencepiece", "benchmarks"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the benchmark of {PACKAGE} needs {name}")
    folder = Path(importlib.util.find_spec("benchmarks").submodule_search_locations[0])
    if not (folder / "benchmark_serving.py").is_file():
        pytest.skip(f"benchmark_serving.py is not in {folder}; it comes with {PACKAGE}")
    return folder / "benchmark_serving.py"


def _conversations(path: Path) -> list[str]:
    """Writes questions and answers in ShareGPT's format -> all their texts."""
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 7))) for _ in range(300)]
    turns = [
        [{"from": who, "value": " ".join(rng.choices(words, k=rng.randint(3, 12)))} for who in pair]
        for pair in [("human", "gpt")] * 300
    ]
    path.write_text(json.dumps([{"conversations": turn} for turn in turns]), encoding="utf-8")
    return [message["value"] for turn in turns for message in turn]


def _sentencepiece(texts: list[str], size: int, folder: Path) -> Path:
    """Trains a model in a process of its own, as TensorFlow and it may not share one."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(texts), encoding="utf-8")
    code = (
        "import sentencepiece, sys\n"
        "sentencepiece.SentencePieceTrainer.train(input=sys.argv[1], model_prefix=sys.argv[2],"
        f" vocab_size={size}, model_type='bpe', minloglevel=2)"
    )
    command = [sys.executable, "-c", code, str(corpus), str(folder / "tokens")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "tokens.model"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_published_benchmark_runs_to_its_end(tiny, tmp_path, capsys):
    script = _benchmark()
    tokens = _sentencepiece(
        _conversations(tmp_path / "local.json"), tiny.tokenizer.vocab_size, tmp_path
    )
    flags = {
        "server": "127.0.0.1",
        "dataset": "sharegpt",
        "dataset-path": tmp_path / "local.json",
        "tokenizer": tokens,
        "num-prompts": PROMPTS,
        "max-output-length": 32,
        "request-rate": 50,
        "warmup-first": "true",
        "additional-metadata-metrics-to-save": "{}",
        "request-outputs-file-path": tmp_path / "out.json",
    }
    switches = ["--disable-tqdm", "--save-result", "--save-request-outputs"]
    servers = []

    engine = Engine(tiny.engine.model, slots=16, max_length=128, prefill_buckets=(32, 64))

    with tiny.driver(engine) as driver:
        async with serving(driver, stop_ids=(), servers=servers):
            flags["port"] = servers[0].port
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(script),
                *(f"--{name}={value}" for name, value in flags.items()),
                *switches,
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output = (await asyncio.wait_for(process.communicate(), 600))[0].decode()
        stats = driver.stats()

    assert process.returncode == 0, output[-3000:]
    (result,) = tmp_path.glob("JetStream-*.json")
    metrics = json.loads(result.read_text(encoding="utf-8"))["metrics"]
    with capsys.disabled():
        sys.stdout.write(f"\n{json.dumps(metrics)}\n")
    assert metrics["completed"] == PROMPTS
    assert metrics["total_output_tokens"] == PROMPTS * 32
    outputs = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert len(outputs) == PROMPTS
    assert all(output["success"] for output in outputs)
    assert (stats.waiting, stats.running, stats.cancelled) == (0, 0, 0)

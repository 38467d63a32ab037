"""`jaxrl serve` as a process: ready, drained, cancelled, failed; and the versions of a run."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from cli.serve_cases import MODEL, arguments

from jaxrl.cli import serve
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.errors import ConfigError
from jaxrl.models.model import build_model, init_params
from jaxrl.models.safetensors import save_params
from jaxrl.serving import protocol
from jaxrl.weights.digest import compute_digest

ROOT = Path(__file__).resolve().parents[2]
LONG = {"prompt": "Hi", "max_tokens": 60, "n": 64, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(folder with a tiny random model, digest of its weights)."""
    folder = tmp_path_factory.mktemp("published") / "tiny"
    built = build_model(MODEL)
    params = init_params(built, 3)
    save_params(folder, built, params)
    load_tokenizer("bytes").save(folder)
    return folder, compute_digest(params)


class Server:
    """A `jaxrl serve` that runs; `lines` is what it has written to stderr."""

    def __init__(self, command, env):
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def wait_for(self, pattern):
        """The match of the first line with it."""
        deadline = time.monotonic() + 240
        while True:
            found = [m for line in self.lines if (m := re.search(pattern, line))]
            if found:
                return found[0]
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.02)

    def request(self, method, path, body=None):
        """(status, body) over HTTP."""
        port = int(self.wait_for(r"listening on http://127\.0\.0\.1:(\d+)")[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        headers = {"Content-Type": "application/json"} if body else {}
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    @contextlib.contextmanager
    def streaming(self):
        """A stream whose first event has come."""
        port = int(self.wait_for(r"listening on http://127\.0\.0\.1:(\d+)")[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        with contextlib.closing(connection):
            raw = json.dumps(LONG)
            connection.request("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.readline().startswith(b"data: ")
            yield answer

    def decode(self):
        """(tokens, numbers and digests of their weights) of a call over gRPC, or its status."""
        port = int(self.wait_for(r"listening on grpc://127\.0\.0\.1:(\d+)")[1])
        request = protocol.DecodeRequest(text_content={"text": "Hi"}, max_tokens=5)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(
                f"/{protocol.SERVICE}/Decode",
                request_serializer=protocol.DecodeRequest.SerializeToString,
                response_deserializer=protocol.DecodeResponse.FromString,
            )
            try:
                responses = list(call(request, timeout=120))
            except grpc.RpcError as error:
                return error.code()
        tokens = [t for r in responses for t in r.stream_content.samples[0].token_ids]
        return tokens, [(w.number, w.digest) for r in responses for w in r.weights]

    def ended(self):
        """The exit code, once there is one."""
        code = self.process.wait(120)
        self._reader.join(60)
        return code


@pytest.fixture
def start(repo_root, programs, published):
    """Function (flags…, code=) -> a running server of the tiny model."""
    env = {**os.environ, "PYTHONPATH": str(repo_root), "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    started = []

    def run(*flags, code="from jaxrl.cli.main import main; import sys; sys.exit(main())"):
        command = [sys.executable, "-c", code, "serve", f"--weights={published[0]}"]
        command += ["--http-port=0", "--grpc-port=-1", "--slots=2", *flags]
        command += ["--config.rollout.prefill_buckets=64"]
        command += [f"--config.observe.compilation_cache={programs}"]
        started.append(Server(command, env))
        return started[-1]

    yield run
    for server in started:
        server.process.kill()
        server.process.wait()
        server._reader.join(60)
        server.process.stderr.close()


def test_server_is_up_at_once_ready_later_and_drains_when_told_to_stop(start, published):
    server = start("--grpc-port=0")

    early, early_call = server.request("GET", "/health"), server.decode()
    server.wait_for(rf"ready: tiny v0:{published[1][:12]} on http://")
    ready, (tokens, weights) = server.request("GET", "/health"), server.decode()
    with server.streaming() as answer:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping: ")
        draining, refused = server.request("GET", "/health"), server.request("GET", "/v1/models")
        refused_call = server.decode()
        rest = answer.read().decode()
    code = server.ended()

    assert early == (503, '{"status":"loading"}')
    assert ready == (200, '{"status":"ready"}')
    assert draining == (503, '{"status":"draining"}')
    assert refused[0] == 503
    assert early_call == refused_call == grpc.StatusCode.UNAVAILABLE
    assert 1 <= len(tokens) <= 5
    assert weights == [(0, published[1])]
    assert rest.endswith("data: [DONE]\n\n")
    assert rest.count('"finish_reason":"length"') == 64
    assert code == 0, server.lines
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.slow
def test_server_cancels_what_is_left_after_the_grace(start):
    server = start("--grace-s=0")
    server.wait_for("ready: ")

    with server.streaming() as answer:
        server.process.send_signal(signal.SIGINT)
        rest = answer.read().decode()
    code = server.ended()

    assert '"code":"not_ready"' in rest
    assert "[DONE]" not in rest
    assert code == 0, server.lines
    assert any("cancelled after 0 s" in line for line in server.lines)


@pytest.mark.slow
def test_second_signal_ends_the_server_at_once(start):
    server = start()
    server.wait_for("ready: ")

    with server.streaming():
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping: ")
        server.process.send_signal(signal.SIGTERM)
        code = server.ended()

    assert code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_signal_while_the_model_loads_ends_the_server_in_order(start):
    server = start()
    server.wait_for("listening on")

    server.process.send_signal(signal.SIGTERM)

    assert server.ended() == 0, server.lines
    assert any("stopped while loading" in line for line in server.lines)


@pytest.mark.slow
def test_failed_engine_ends_the_server_with_its_cause(start):
    server = start(
        code="import sys\n"
        "from jaxrl.cli.main import main\n"
        "from jaxrl.inference.engine import Engine\n"
        "real, calls = Engine.generate, []\n"
        "def generate(*args, **kwargs):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 3:\n"
        "        raise RuntimeError('the chip is gone')\n"
        "    return real(*args, **kwargs)\n"
        "Engine.generate = generate\n"
        "sys.exit(main())\n"
    )
    server.wait_for("ready: ")

    with server.streaming() as answer:
        rest = answer.read().decode()
    code = server.ended()

    assert '"code":"engine_failed"' in rest
    assert code == 1
    assert any(
        "error: the decode engine failed: RuntimeError: the chip is gone" in line
        for line in server.lines
    )


def test_port_that_is_taken_is_the_users_mistake(jaxrl, published):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = [f"--weights={published[0]}", f"--http-port={port}", "--grpc-port=-1"]
        code, _, log = jaxrl("serve", *flags)

    assert code == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in log


def test_host_that_is_no_name_is_the_users_mistake(jaxrl, published):
    flags = [f"--weights={published[0]}", "--host=a..b", "--http-port=0", "--grpc-port=-1"]

    code, _, log = jaxrl("serve", *flags)

    assert code == 2
    assert "cannot listen on a..b, port 0" in log


def test_longer_context_than_the_models_is_the_users_mistake(jaxrl, published):
    flags = [f"--weights={published[0]}", "--http-port=0", "--grpc-port=-1", "--max-length=65"]

    code, _, log = jaxrl("serve", *flags)

    assert code == 2
    assert "--max-length=65 must be at most 64" in log


def test_missing_package_is_named_with_its_extra(published, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "aiohttp" else find(name)
    )
    args = arguments(f"--weights={published[0]}", "--grpc-port=-1")

    with pytest.raises(ConfigError, match=re.escape("needs aiohttp: pip install 'jaxrl[serve]'")):
        serve.run(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "exactly one of --run and --weights"),
        (["--weights=a", "--follow"], "--follow needs --run"),
        (
            ["--run=a", "--follow", "--version=3"],
            "--version=3 pins the weights",
        ),
        (["--weights=a", "--http-port=-1", "--grpc-port=-1"], "nothing would be served"),
        (["--weights=a", "--http-port=5000", "--grpc-port=5000"], "must differ"),
        (["--weights=a", "--http-port=70000"], "must be between -1 and 65535"),
        (["--weights=a", "--slots=0"], "must be at least 1"),
        (["--weights=a", "--timeout-s=0"], "must be above 0"),
        (["--weights=a", "--grace-s=1e11"], "must be between 0 and 100000000"),
        (["--weights=a", "--in-flight=later"], "in-flight"),
        (["--weights=a", "--htp-port=1"], "did you mean --http-port?"),
    ],
)
def test_flags_that_contradict_are_refused_before_anything_is_read(flags, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        arguments(*flags)


def test_server_listens_on_loopback_unless_told_otherwise(published):
    assert arguments(f"--weights={published[0]}").options.host == "127.0.0.1"

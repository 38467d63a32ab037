"""Real `jaxrl serve --follow` processes for a run, and what its files say in the end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from distributed.processes import free_port

from jaxrl.config.serialize import save_config
from jaxrl.orchestration.ledger import effective, published_versions, read_ledger
from jaxrl.orchestration.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]


class Sampler:
    """A server for the run in `folder`, on a port that stays its own; `text` is what it said."""

    def __init__(self, folder: str, *flags: str, token: str = ""):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        self._command = [sys.executable, "-m", "jaxrl", "serve", f"--run={folder}", "--follow"]
        self._command += [f"--http-port={self.port}", "--grpc-port=-1", "--grace-s=1", *flags]
        # Compiling is most of what a server costs.
        self._command += [f"--config.observe.compilation_cache={ROOT / '.pytest_cache' / 'jax'}"]
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA_"))},
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            **({"JAXRL_SERVE_TOKEN": token} if token else {}),
        }
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it, for the first time or again."""
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True).start()

    def _read(self, stream) -> None:
        with stream:
            self.lines += iter(stream.readline, "")

    @property
    def text(self) -> str:
        """All that it has said."""
        return "".join(self.lines)

    def kill(self) -> None:
        """End it at once, as a machine that fails does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(60)


@contextlib.contextmanager
def samplers_of(config, count=1, *flags, token="", start=True, **rollout):
    """(the config with samplers, the servers) of a run that may not have begun."""
    servers = [Sampler(config.output_dir, *flags, token=token) for _ in range(count)]
    urls = tuple(server.url for server in servers)
    rollout = dataclasses.replace(config.rollout, samplers=urls, **rollout)
    config = dataclasses.replace(config, rollout=rollout)
    folder = RunDir(config.output_dir)
    folder.path.mkdir(parents=True, exist_ok=True)
    save_config(config, folder.config)
    try:
        for server in servers if start else ():
            server.start()
        yield config, servers
    finally:
        for server in servers:
            server.kill()


def records_of(config) -> list[dict]:
    """The ledger, without what a resume made void."""
    return effective(read_ledger(RunDir(config.output_dir).ledger))


def digests_of(config) -> dict[int, str]:
    """Version number -> digest, of all that the run has published."""
    return published_versions(read_ledger(RunDir(config.output_dir).ledger))


def batches_of(config) -> list:
    """[(groups, digests of their versions)] of all updates."""
    folder = RunDir(config.output_dir)
    return [folder.read_trajectories(n) for n in folder.updates_with_trajectories()]


def until(condition, what: str) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.02)

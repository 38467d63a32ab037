"""A served load through gRPC: our server against JetStream's own around the same engine.

`python benchmarks/served_load.py [--rounds N] [--rates 3 6 ...]`: 200 requests with the lengths
and shared beginnings of chats, at several rates and all at once, greedy. Each server is a process
of its own, this process is the client of both, with the same bytes. They take turns, round after
round, because the speed of a shared machine drifts; a ratio is the median over rounds. CPU-seconds
are those of the server's process. Needs the extras `serve` and `jetstream`, and Linux. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
from load_requests import LENGTH, REQUESTS, SLOTS, Ask, make_load
from shapes import emit

from jaxrl.serving import protocol

FOLDER = Path(__file__).resolve().parent
SIDES = ("jaxrl", "jetstream")
HIGHER, LOWER = (
    ("tokens_per_wall_second", "tokens_per_cpu_second"),
    ("ttft_ms_p50", "ttft_ms_p99", "gap_ms_p50", "gap_ms_p99", "token_ms_p50", "token_ms_p99"),
)


class Server:
    """A server in a process of its own."""

    def __init__(self, side: str, *flags: str):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(FOLDER.parent)}
        command = [sys.executable, str(FOLDER / "load_server.py"), side, *flags]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        # Whatever else it prints comes before.
        lines = (line for line in self._process.stdout if line.startswith('{"port"'))
        line = next(lines, None)
        if line is None:
            raise SystemExit(f"the server {side} did not start")
        self.port = json.loads(line)["port"]

    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it by closing its input."""
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Answer:
    """What one request got: its tokens, and when how many of them came."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.arrivals: list[tuple[float, int]] = []

    async def read(self, method: grpc.aio.UnaryStreamMultiCallable, ask: Ask, start: float) -> None:
        """Wait for the request's moment, send it, and read everything."""
        self.due = start + ask.at
        await asyncio.sleep(max(0.0, self.due - time.perf_counter()))
        request = protocol.DecodeRequest(
            token_content={"token_ids": ask.tokens}, max_tokens=ask.max_tokens, temperature=0.0
        )
        async for response in method(request):
            tokens = response.stream_content.samples[0].token_ids
            if tokens:
                self.arrivals.append((time.perf_counter(), len(tokens)))
                self.tokens += tokens


async def send(port: int, asks: list[Ask]) -> tuple[list[Answer], float]:
    """All requests in their time -> (answers, seconds until the last one ended)."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        method = channel.unary_stream(
            f"/{protocol.SERVICE}/Decode",
            request_serializer=protocol.DecodeRequest.SerializeToString,
            response_deserializer=protocol.DecodeResponse.FromString,
        )
        answers = [Answer() for _ in asks]
        start = time.perf_counter()
        reads = zip(answers, asks, strict=True)
        await asyncio.gather(*(answer.read(method, ask, start) for answer, ask in reads))
        return answers, time.perf_counter() - start


def run(server: Server, asks: list[Ask]) -> tuple[dict[str, float], list[list[int]]]:
    """One load -> (its figures, the tokens of every request)."""
    before = server.cpu_seconds()
    answers, wall = asyncio.run(send(server.port, asks))
    cpu = server.cpu_seconds() - before
    got = [len(answer.tokens) for answer in answers]
    if got != [ask.max_tokens for ask in asks]:
        raise SystemExit("a server gave more or fewer tokens than were asked for")
    return figures(answers, wall, cpu), [answer.tokens for answer in answers]


def figures(answers: list[Answer], wall: float, cpu: float) -> dict[str, float]:
    """`ttft` is from the moment when a request was due to its first token, `gap` between two
    messages of a request, `token` the mean over a request of the time for each further token."""
    moments = [[at for at, _ in answer.arrivals] for answer in answers]
    times = {
        "ttft": [at[0] - answer.due for at, answer in zip(moments, answers, strict=True)],
        "gap": [b - a for at in moments for a, b in itertools.pairwise(at)],
        "token": [
            (at[-1] - at[0]) / (len(answer.tokens) - answer.arrivals[0][1])
            for at, answer in zip(moments, answers, strict=True)
            if len(at) > 1
        ],
    }
    tokens = sum(len(answer.tokens) for answer in answers)
    result = {"tokens_per_wall_second": tokens / wall, "tokens_per_cpu_second": tokens / cpu}
    for name, seconds in times.items():
        for percent in (50, 99):
            result[f"{name}_ms_p{percent}"] = 1000 * float(np.percentile(seconds, percent))
    return result


@contextlib.contextmanager
def servers(sides: list[str], *flags: str) -> Iterator[dict[str, Server]]:
    """Both servers, warm."""
    started: dict[str, Server] = {}
    try:
        for side in sides:
            started[side] = Server(side, *flags)
            run(started[side], make_load(0, None)[:SLOTS])
        yield started
    finally:
        for server in started.values():
            server.stop()


def summary(seen: dict[str, list[dict[str, float]]]) -> dict:
    """Medians of both sides, and of the ratio of each round (above 1: ours is better)."""
    record: dict = {
        side: {name: round(statistics.median(r[name] for r in runs), 1) for name in runs[0]}
        for side, runs in seen.items()
    }
    if len(seen) == len(SIDES):
        pairs = list(zip(*(seen[side] for side in SIDES), strict=True))
        ratios = {name: [a[name] / b[name] for a, b in pairs] for name in HIGHER}
        ratios |= {name: [b[name] / a[name] for a, b in pairs] for name in LOWER}
        record["ratio"] = {name: round(statistics.median(r), 2) for name, r in ratios.items()}
        record["ratios"] = {name: [round(x, 2) for x in r] for name, r in ratios.items()}
    return record


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=[3.0, 6.0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, help="our most tokens per slot and dispatch")
    parser.add_argument(
        "--peer-attend", type=int, nargs="*", default=[], help="attend_buckets of their engine"
    )
    args = parser.parse_args()
    rates = [*args.rates, None]
    seen: dict = {rate: {side: [] for side in args.sides} for rate in rates}
    different = 0
    flags = [] if args.steps is None else [f"--steps={args.steps}"]
    flags += ["--attend", *map(str, args.peer_attend)]
    with servers(args.sides, *flags) as started:
        for number, rate in itertools.product(range(args.rounds), rates):
            asks = make_load(1 + number * len(rates) + rates.index(rate), rate)
            tokens = []
            for side, server in started.items():
                result, answers = run(server, asks)
                seen[rate][side].append(result)
                tokens.append(answers)
            different += sum(a != b for a, b in zip(tokens[0], tokens[-1], strict=True))
    emit(
        {
            "benchmark": "served_load",
            "requests": REQUESTS,
            "slots": SLOTS,
            "max_length": LENGTH,
            "prompt_tokens": sum(len(ask.tokens) for ask in asks),
            "new_tokens": sum(ask.max_tokens for ask in asks),
            "completions_that_differ": different,
            "load_average": os.getloadavg(),
            "rates": {
                "all at once" if rate is None else f"{rate:g} a second": summary(runs)
                for rate, runs in seen.items()
            },
        }
    )


if __name__ == "__main__":
    main()

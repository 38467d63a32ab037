"""Thousands of HTTP requests at one time: each is answered or refused, and nothing is left."""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import os
import threading
from pathlib import Path

import jax
import pytest
from inference.gates import Gate
from serving.conftest import LENGTH
from serving.servers import serving, until

GOOD = {
    "one token": {"prompt": [104]},
    "text": {"prompt": "Hi there"},
    "stream": {"prompt": "Hi there", "stream": True},
    "as long as fits": {"prompt": [5] * (LENGTH - 4)},
}
BAD = {
    "no token": {"prompt": []},
    "too long": {"prompt": [5] * LENGTH},
    "outside the vocabulary": {"prompt": [9999]},
    "max_tokens 0": {"prompt": "Hi", "max_tokens": 0},
    "max_tokens huge": {"prompt": "Hi", "max_tokens": 10**9},
    "unknown field": {"prompt": "Hi", "max_token": 3},
    "no UTF-8": b'{"prompt": "\xff"}',
    "no JSON": b'{"prompt": ',
}
LEAVES = {"prompt": "Hi", "max_tokens": 100, "ignore_eos": True}
KINDS = [*GOOD, *BAD, "leaves", *GOOD]
GROWTH = 32 << 20
"""Bytes that a process may grow by for reasons of its allocator."""


def _message(kind: str) -> bytes:
    fields = GOOD.get(kind) or BAD.get(kind) or LEAVES
    body = fields if isinstance(fields, bytes) else json.dumps({"max_tokens": 4, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def _outcome(port: int, number: int) -> tuple[str, str]:
    """(what was asked, what became of it)."""
    kind = KINDS[number % len(KINDS)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_message(kind))
        if kind == "leaves":
            await asyncio.sleep(0.01 * (number % 100))
            return kind, "left"
        answer = (await asyncio.wait_for(reader.read(), 300)).decode()
    finally:
        writer.transport.abort()
    status = answer.split(" ", 2)[1]
    whole = "data: [DONE]" in answer if kind == "stream" else '"total_tokens"' in answer
    return kind, f"{status} whole" if whole else status


async def _crowd(port: int, calls: int) -> collections.Counter:
    return collections.Counter(await asyncio.gather(*(_outcome(port, i) for i in range(calls))))


def _taken(driver) -> dict[str, int]:
    """What of this process is in use: slots, queue, threads, open files, arrays, memory."""
    until(lambda: driver.stats().running == driver.stats().waiting == 0)
    gc.collect()
    return {
        "slots": len(driver._batcher.free_slots),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "arrays": sum(x.nbytes for x in jax.live_arrays()) - driver.stats().prefix_bytes,
        "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, as Linux has it")
@pytest.mark.parametrize("calls", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_requests_at_once_are_answered_or_refused_and_nothing_is_left(tiny, calls):
    engine, most = Gate(tiny.engine, hold_at=[1]), calls // 4
    with tiny.driver(engine, max_waiting=most) as driver:
        with serving(driver, max_waiting=most) as server:
            # The first crowd finds everything held up, so that the queue runs full.
            threading.Thread(
                target=lambda: (until(lambda: driver.stats().refused >= 1), engine.go.set())
            ).start()
            first = asyncio.run(_crowd(server.server.port, calls))
            before = _taken(driver)
            second = asyncio.run(_crowd(server.server.port, calls))
            after = _taken(driver)
            served = server.complete(prompt="Hi", max_tokens=3)[0]

    for counts in (first, second):
        assert sum(counts.values()) == calls
        wrong = {
            outcome: count
            for outcome, count in counts.items()
            if outcome[1] not in _allowed(outcome[0])
        }
        assert wrong == {}
        assert sum(n for (kind, what), n in counts.items() if what == "200 whole") >= most // 2
    assert any(what == "429" for _, what in first)
    assert served == 200
    assert before["slots"] == after["slots"] == 4
    assert after["memory"] - before["memory"] < GROWTH
    for name in ("threads", "files", "arrays"):
        assert after[name] <= before[name], name


def _allowed(kind: str) -> set[str]:
    return {"left"} if kind == "leaves" else {"400"} if kind in BAD else {"200 whole", "429"}

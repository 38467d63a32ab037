"""Thousands of calls at one time: each is answered or refused with a reason, and none is left."""

from __future__ import annotations

import asyncio
import collections

import grpc
import pytest
from inference.gates import Gate
from serving.grpc_setup import PROMPT, decode, gathered, ids, serving
from serving.servers import until

from jaxrl.serving.grpc_server import OPTIONS

CHANNELS = 8


async def _patient(channel, number):
    """Waits for all of the answer."""
    call = decode(channel, token_content=ids(*PROMPT, number % 250), max_tokens=4, seed=number)
    tokens = gathered([response async for response in call])
    return "whole" if len(tokens) == 4 else f"{len(tokens)} tokens"


async def _vanishing(channel, number):
    """Leaves in the middle of its answer, or before it began."""
    call = decode(channel, token_content=ids(*PROMPT, number % 250), max_tokens=50, seed=number)
    if number % 2:
        await asyncio.sleep(0.01 * (number % 100))
    else:
        await anext(aiter(call))
    call.cancel()
    return "left"


async def _hurried(channel, number):
    """Has a deadline that the server cannot keep for most."""
    fields = {"token_content": ids(*PROMPT, number % 250), "max_tokens": 50}
    call = decode(channel, **fields, timeout=0.05 + 0.01 * (number % 50))
    tokens = gathered([response async for response in call])
    return "whole" if len(tokens) == 50 else f"{len(tokens)} tokens"


async def _outcome(channel, number) -> str:
    kind = {0: _vanishing, 1: _hurried}.get(number % 10, _patient)
    try:
        return f"{kind.__name__} {await kind(channel, number)}"
    except grpc.aio.AioRpcError as error:
        return f"{kind.__name__} {error.code().name}"


@pytest.mark.asyncio
@pytest.mark.parametrize("calls", [300, pytest.param(2000, marks=pytest.mark.slow)])
async def test_calls_at_once_are_answered_or_refused_and_nothing_is_left(tiny, calls):
    max_waiting = calls * 6 // 10
    engine, servers = Gate(tiny.engine, hold_at=[1]), []
    with tiny.driver(engine, max_waiting=max_waiting) as driver:
        async with serving(driver, stop_ids=(), servers=servers):
            address = f"127.0.0.1:{servers[0].port}"
            channels = [
                # A pool of its own for each, or all share one connection.
                grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
                for _ in range(CHANNELS)
            ]
            crowd = asyncio.gather(*(_outcome(channels[i % CHANNELS], i) for i in range(calls)))
            # Nothing is answered before the queue has been full: some calls must be refused.
            await asyncio.to_thread(until, lambda: driver.stats().refused >= calls // 10)
            engine.go.set()
            counts = collections.Counter(await crowd)
            await asyncio.to_thread(
                until, lambda: driver.stats().waiting == driver.stats().running == 0
            )
            after = await _outcome(channels[0], 2)
            for channel in channels:
                await channel.close()

    assert sum(counts.values()) == calls
    # Nobody is cancelled who did not leave, and nobody gets half an answer.
    allowed = {
        "_patient": {"whole", "RESOURCE_EXHAUSTED"},
        "_vanishing": {"left", "RESOURCE_EXHAUSTED"},
        "_hurried": {"whole", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"},
    }
    assert [o for o in counts if o.split()[1] not in allowed[o.split()[0]]] == []
    assert counts["_patient whole"] >= max_waiting // 2
    assert sum(n for o, n in counts.items() if "RESOURCE" in o) >= calls // 10
    assert after == "_patient whole"


def test_grpc_itself_refuses_no_call_of_a_crowd():
    options = dict(OPTIONS)

    assert options["grpc.server.max_pending_requests"] >= 100_000
    assert options["grpc.server.max_pending_requests_hard_limit"] >= 100_000

"""Tokens handed out while they are decoded, whoever takes them or leaves."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import CancelledError

import jax
import numpy as np
import pytest
from inference.gates import Gate, driver_of, until

from jaxrl.errors import DriverError, RequestError
from jaxrl.inference.driver import Driver
from jaxrl.inference.streaming import Channel, Chunk
from jaxrl.types import SamplingParams


def _joined(chunks):
    """(tokens, logprobs, versions) of all chunks."""
    names = ("tokens", "logprobs", "versions")
    return [np.concatenate([getattr(c, n) for c in chunks]) for n in names]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chunks_are_the_completion_bit_for_bit(tiny, prompts, temperature):
    params = SamplingParams(11, temperature, seed=3)

    with driver_of(tiny) as driver:
        whole = driver.sample_blocking(prompts[3], params)
        stream = driver.stream(prompts[3], params)
        chunks = list(stream)

    tokens, logprobs, versions = _joined(chunks)
    np.testing.assert_array_equal(tokens, whole.tokens)
    np.testing.assert_array_equal(logprobs.view(np.int32), whole.logprobs.view(np.int32))
    np.testing.assert_array_equal(versions, whole.versions)
    np.testing.assert_array_equal(stream.completion.tokens, whole.tokens)
    assert stream.completion.finish_reason == whole.finish_reason == "length"
    # The first token as soon as it is there, then the rest of its dispatch of four, and so on.
    assert [len(chunk.tokens) for chunk in chunks] == [1, 3, 4, 3]


def test_stop_token_is_in_the_last_chunk(tiny, prompts):
    free = tiny.naive(prompts[5], SamplingParams(12, 1.0, seed=4))[0]
    params = SamplingParams(12, 1.0, 4, stop_tokens=(int(free[5]),))

    with driver_of(tiny) as driver:
        stream = driver.stream(prompts[5], params)
        tokens = _joined(list(stream))[0]

    assert tokens[-1] == free[5]
    assert stream.completion.finish_reason == "stop"


def test_first_chunk_comes_before_the_first_dispatch(tiny, prompts):
    engine = Gate(tiny.engine, hold_at=[1])

    with driver_of(tiny, engine) as driver, driver.stream(prompts[0], SamplingParams(8)) as stream:
        first = next(stream)
        ended_early = engine.reached.wait(60) and engine.dispatches == 1
        engine.go.set()
        rest = list(stream)

    assert ended_early
    assert [len(c.tokens) for c in (first, *rest)] == [1, 3, 4]


def test_stream_of_one_token_has_one_chunk(tiny, prompts):
    with driver_of(tiny) as driver:
        chunks = list(driver.stream(prompts[2], SamplingParams(1, seed=6)))

    assert [chunk.tokens.tolist() for chunk in chunks] == [
        tiny.naive(prompts[2], SamplingParams(1, seed=6))[0].tolist()
    ]


@pytest.mark.asyncio
async def test_many_streams_at_once_each_get_their_own_tokens(tiny, prompts):
    jobs = [(prompts[i % 8], SamplingParams(3 + i, 1.0, seed=i)) for i in range(12)]

    async def take(driver, job):
        return _joined([chunk async for chunk in driver.stream(*job)])[0]

    with driver_of(tiny) as driver:
        results = await asyncio.gather(*(take(driver, job) for job in jobs))

    for (prompt, params), tokens in zip(jobs, results, strict=True):
        np.testing.assert_array_equal(tokens, tiny.naive(prompt, params)[0])


def test_slow_consumer_does_not_hold_the_driver_up(tiny, prompts):
    with driver_of(tiny) as driver:
        stream = driver.stream(prompts[0], SamplingParams(12, seed=1))
        driver.sample_blocking(prompts[1], SamplingParams(30, seed=2))
        until(lambda: driver.stats().finished == 2)  # nobody has taken a chunk yet
        tokens = _joined(list(stream))[0]

    np.testing.assert_array_equal(tokens, tiny.naive(prompts[0], SamplingParams(12, seed=1))[0])


def _leave_by_close(stream):
    next(stream)
    stream.close()
    stream.close()


def _leave_with(stream):
    with stream:
        next(stream)


def _leave_loop(stream):
    for _ in stream:
        break


@pytest.mark.parametrize("leave", [_leave_by_close, _leave_with, _leave_loop])
def test_consumer_that_leaves_frees_the_slot(tiny, prompts, leave):
    engine = Gate(tiny.engine, hold_at=[2])
    with driver_of(tiny, engine) as driver:
        leave(driver.stream(prompts[0], SamplingParams(40)))
        gc.collect()
        engine.go.set()
        until(lambda: driver.stats().running == 0)

        stats = driver.stats()
        after = driver.sample_blocking(prompts[1], SamplingParams(5, seed=2))

    assert (stats.cancelled, stats.finished) == (1, 0)
    np.testing.assert_array_equal(
        after.tokens, tiny.naive(prompts[1], SamplingParams(5, seed=2))[0]
    )


def test_taking_from_a_closed_stream_raises(tiny, prompts):
    driver = driver_of(tiny)
    stream = driver.stream(prompts[0], SamplingParams(4))

    stream.close()

    with pytest.raises(CancelledError):
        next(stream)
    assert driver.stats().waiting == 0


def test_closing_after_the_end_keeps_the_completion(tiny, prompts):
    with driver_of(tiny) as driver, driver.stream(prompts[0], SamplingParams(4)) as stream:
        chunks = list(stream)

    np.testing.assert_array_equal(stream.completion.tokens, _joined(chunks)[0])
    assert driver.stats().cancelled == 0


@pytest.mark.asyncio
async def test_cancelled_task_frees_the_slot(tiny, prompts):
    engine = Gate(tiny.engine, hold_at=[2])

    seen = []

    async def consume(driver):
        async for chunk in driver.stream(prompts[0], SamplingParams(40)):
            seen.append(chunk)

    with driver_of(tiny, engine) as driver:
        task = asyncio.create_task(consume(driver))
        await asyncio.to_thread(engine.reached.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.go.set()
        await asyncio.to_thread(until, lambda: driver.stats().running == 0)

    assert driver.stats().cancelled == 1
    assert len(seen) <= 2  # the first token, and the rest of the one dispatch before


@pytest.mark.asyncio
async def test_wait_that_is_cut_short_loses_no_token(tiny, prompts):
    engine = Gate(tiny.engine, hold_at=[1])
    with driver_of(tiny, engine) as driver:
        stream = driver.stream(prompts[0], SamplingParams(9, seed=5))
        chunks = [await anext(stream)]
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.001)
        engine.go.set()
        chunks += [chunk async for chunk in stream]

    wanted = tiny.naive(prompts[0], SamplingParams(9, seed=5))[0]
    np.testing.assert_array_equal(_joined(chunks)[0], wanted)


ONE = Chunk(np.array([1]), np.zeros(1, np.float32), np.zeros(1, np.int32))


@pytest.mark.asyncio
@pytest.mark.parametrize("woken", [False, True])
async def test_chunk_that_came_in_the_moment_of_an_interruption_is_not_lost(woken):
    channel = Channel()
    waiting = asyncio.create_task(channel.arrival())
    await asyncio.sleep(0)
    channel.put(ONE)
    if woken:
        # After the loop has ended the wait, before the task has gone on.
        asyncio.get_running_loop().call_soon(waiting.cancel)
        await asyncio.sleep(0)
    else:
        waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert await channel.arrival() is ONE


@pytest.mark.asyncio
async def test_news_for_many_streams_call_their_loop_once(monkeypatch):
    loop, calls = asyncio.get_running_loop(), []
    call = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a: (calls.append(a), call(*a)))
    channels = [Channel() for _ in range(5)]
    waiting = [asyncio.create_task(channel.arrival()) for channel in channels]
    await asyncio.sleep(0)

    for channel in channels:
        channel.put(ONE)

    assert await asyncio.gather(*waiting) == [ONE] * 5
    assert len(calls) == 1


def test_consumer_whose_loop_is_closed_does_not_hurt_the_driver(tiny, prompts):
    engine = Gate(tiny.engine, hold_at=[1])
    kept = []

    async def leave_waiting(driver):
        kept.append(driver.stream(prompts[0], SamplingParams(8)))
        await anext(kept[0])
        kept.append(asyncio.ensure_future(anext(kept[0])))
        await asyncio.sleep(0)

    with driver_of(tiny, engine) as driver:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave_waiting(driver))
        loop.close()
        engine.go.set()
        after = driver.sample_blocking(prompts[1], SamplingParams(5, seed=2))

    wanted = tiny.naive(prompts[1], SamplingParams(5, seed=2))[0]
    np.testing.assert_array_equal(after.tokens, wanted)


def test_engine_failure_comes_out_after_the_tokens_before_it(tiny, prompts):
    engine = Gate(tiny.engine, hold_at=[1])
    with driver_of(tiny, engine) as driver:
        stream = driver.stream(prompts[0], SamplingParams(20))
        first = next(stream)
        assert engine.reached.wait(60)
        engine.error = RuntimeError("device lost")
        engine.go.set()
        with pytest.raises(DriverError, match="device lost"):
            next(stream)
        with pytest.raises(DriverError, match="device lost"):
            driver.stream(prompts[0], SamplingParams(2))

    assert len(first.tokens) == 1


def test_stopped_driver_ends_the_stream_with_its_error(tiny, prompts):
    driver = driver_of(tiny)
    waiting = driver.stream(prompts[0], SamplingParams(20))

    driver.stop()

    with pytest.raises(DriverError, match="stopped"):
        next(waiting)


def test_weights_that_give_no_numbers_end_in_an_error(tiny, prompts):
    broken = jax.tree.map(lambda x: x * np.nan, tiny.params[0])

    with Driver(tiny.engine, broken, tiny.versions[0], verify=False) as driver:
        with pytest.raises(DriverError, match="log-probability nan"):
            list(driver.stream(prompts[0], SamplingParams(3)))


def test_bad_request_is_refused_before_a_stream_exists(tiny):
    with pytest.raises(RequestError, match="the prompt is empty"):
        driver_of(tiny).stream(np.array([], np.int32), SamplingParams(5))


def test_stream_follows_new_weights_with_a_version_per_token(tiny, prompts):
    engine = Gate(tiny.engine, hold_at=[2])
    with driver_of(tiny, engine, in_flight="continue") as driver:
        stream = driver.stream(prompts[0], SamplingParams(16, seed=1))
        first = next(stream)
        engine.reached.wait(60)
        swap = threading.Thread(target=driver.set_weights, args=(tiny.params[1], tiny.versions[1]))
        swap.start()
        until(lambda: driver._swap is not None)
        engine.go.set()
        swap.join(60)
        versions = _joined([first, *stream])[2]

    np.testing.assert_array_equal(versions, stream.completion.versions)
    assert set(versions.tolist()) == {0, 1}

"""The driver: completions, schedule independence, cancellation, failure, and what it never does."""

from __future__ import annotations

import asyncio
import threading
import time

import jax
import numpy as np
import pytest
from host_sync import counting_host_syncs
from inference.gates import Gate, driver_of

from jaxrl.errors import DeadlineError, DriverError, RequestError
from jaxrl.inference.driver import Driver
from jaxrl.types import SamplingParams

pytestmark = pytest.mark.asyncio


async def _until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.002)


async def test_completions_equal_one_full_forward_per_token(tiny, prompts):
    params = [
        SamplingParams(3 + 2 * i, (0.0, 0.6, 1.0)[i % 3], seed=100 + i) for i in range(len(prompts))
    ]
    with driver_of(tiny) as driver:
        completions = await asyncio.gather(*map(driver.sample, prompts, params))

    for prompt, wanted, got in zip(prompts, params, completions, strict=True):
        tokens, logps = tiny.naive(prompt, wanted)
        np.testing.assert_array_equal(got.tokens, tokens)
        np.testing.assert_allclose(got.logprobs, logps, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(got.versions, np.zeros(len(tokens)))
        assert (got.finish_reason, got.text) == ("length", "")
        assert (got.tokens.dtype, got.logprobs.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("order_seed", range(6))
async def test_tokens_do_not_depend_on_order_slot_or_neighbours(tiny, prompts, order_seed):
    rng = np.random.default_rng(order_seed)
    jobs = [
        (prompts[i % len(prompts)], SamplingParams(1 + 3 * (i % 5), 1.0, seed=i)) for i in range(14)
    ]
    order = rng.permutation(len(jobs))
    got = {}

    async def one(driver, index):
        # Arrivals are spread in time, so that schedules differ from run to run.
        await asyncio.sleep(rng.uniform(0, 0.02))
        got[index] = await driver.sample(*jobs[index])

    with driver_of(tiny) as driver:
        await asyncio.gather(*(one(driver, int(index)) for index in order))

    for index, (prompt, params) in enumerate(jobs):
        np.testing.assert_array_equal(got[index].tokens, tiny.naive(prompt, params)[0])


async def test_schedule_is_the_same_for_the_same_requests_in_the_same_order(tiny, prompts):
    def run():
        driver = driver_of(tiny)
        futures = [
            driver.submit(prompts[i % 8], SamplingParams(2 + i % 7, 1.0, seed=i)) for i in range(20)
        ]
        finished = []
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: finished.append(i))
        with driver:
            for future in futures:
                future.result(60)
        stats = driver.stats()
        return finished, stats.dispatches, stats.prefills, stats.prefix_hits

    assert run() == run()


async def test_group_is_prefilled_once_also_when_members_are_admitted_later(tiny, prompts):
    params = [SamplingParams(5, 1.0, seed=i) for i in range(9)]
    driver = driver_of(tiny)
    futures = [driver.submit(prompts[4], p) for p in params]

    with driver:
        completions = [await asyncio.wrap_future(future) for future in futures]

    stats = driver.stats()
    assert (stats.prefills, stats.prefix_hits) == (1, 8)
    for wanted, got in zip(params, completions, strict=True):
        np.testing.assert_array_equal(got.tokens, tiny.naive(prompts[4], wanted)[0])


async def test_many_more_requests_than_slots_all_finish(tiny, prompts):
    with driver_of(tiny) as driver:
        completions = await asyncio.gather(
            *(driver.sample(prompts[i % 8], SamplingParams(1 + i % 9, seed=i)) for i in range(60))
        )

    assert [len(c.tokens) for c in completions] == [1 + i % 9 for i in range(60)]
    stats = driver.stats()
    assert (stats.finished, stats.waiting, stats.running) == (60, 0, 0)
    assert stats.tokens == sum(1 + i % 9 for i in range(60))
    assert stats.tokens_per_second > 0


async def test_sampled_stop_token_ends_the_completion_and_keeps_its_logprob(tiny, prompts):
    free, logps = tiny.naive(prompts[5], SamplingParams(12, 1.0, seed=4))
    stop = int(free[5])
    end = int(np.flatnonzero(free == stop)[0]) + 1

    with driver_of(tiny) as driver:
        got = await driver.sample(prompts[5], SamplingParams(12, 1.0, 4, stop_tokens=(stop,)))

    assert got.finish_reason == "stop"
    np.testing.assert_array_equal(got.tokens, free[:end])
    np.testing.assert_allclose(got.logprobs, logps[:end], rtol=0, atol=1e-4)
    assert got.logprobs[-1] < -1e-3


async def test_bad_request_fails_alone(tiny, prompts):
    with driver_of(tiny) as driver:
        good = asyncio.create_task(driver.sample(prompts[0], SamplingParams(5)))
        with pytest.raises(RequestError, match="the prompt is empty"):
            await driver.sample(np.array([], np.int32), SamplingParams(5))
        with pytest.raises(RequestError, match=r"= 72 is beyond the context of 48"):
            await driver.sample(prompts[7], SamplingParams(48))
        assert len((await good).tokens) == 5


async def test_cancelled_request_leaves_the_queue_at_once_and_frees_its_slot(tiny, prompts):
    engine = Gate(tiny.engine, hold_at=[1])
    driver = driver_of(tiny, engine)
    running = [
        asyncio.create_task(driver.sample(prompts[i], SamplingParams(20, seed=i))) for i in range(4)
    ]
    # Before the start: all of them, not those who happen to be quick, are in the first dispatch.
    await _until(lambda: driver.stats().waiting == 4)
    with driver:
        await asyncio.to_thread(engine.reached.wait, 60)
        queued = [
            asyncio.create_task(driver.sample(prompts[i], SamplingParams(4, seed=i)))
            for i in range(3)
        ]
        await _until(lambda: driver.stats().waiting == 3)

        queued[0].cancel()
        await asyncio.sleep(0)
        assert driver.stats().waiting == 2

        running[1].cancel()
        running[2].cancel()
        ended = []
        left = [running[0], running[3], queued[1], queued[2]]
        for task in left:
            task.add_done_callback(ended.append)
        engine.go.set()
        with pytest.raises(asyncio.CancelledError):
            await running[1]
        completions = await asyncio.gather(*left)

    # The queued ones took the freed slots while the others were still running.
    assert ended[:2] == [queued[1], queued[2]]
    for i, limit, got in zip((0, 3, 1, 2), (20, 20, 4, 4), completions, strict=True):
        wanted = tiny.naive(prompts[i], SamplingParams(limit, seed=i))[0]
        np.testing.assert_array_equal(got.tokens, wanted)
    assert driver.stats().cancelled == 3


async def test_two_event_loops_share_onedriver_of(tiny, prompts):
    results = {}

    def loop(name):
        async def main():
            return await asyncio.gather(
                *(driver.sample(prompts[i], SamplingParams(6, seed=i)) for i in range(6))
            )

        results[name] = asyncio.run(main())

    with driver_of(tiny) as driver:
        threads = [threading.Thread(target=loop, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join, 60)

    for a, b in zip(results["a"], results["b"], strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


async def test_event_loop_keeps_turning_while_the_engine_works(tiny, prompts):
    engine = Gate(tiny.engine, hold_at=[1])
    with driver_of(tiny, engine) as driver:
        task = asyncio.create_task(driver.sample(prompts[0], SamplingParams(3)))
        await asyncio.to_thread(engine.reached.wait, 60)
        turns = 0
        for _ in range(50):
            await asyncio.sleep(0)
            driver.stats()
            turns += 1
        assert (turns, task.done()) == (50, False)
        engine.go.set()
        await task


async def test_engine_failure_fails_everyone_with_the_cause_and_later_requests_at_once(
    tiny, prompts
):
    engine = Gate(tiny.engine, hold_at=[2])
    with driver_of(tiny, engine) as driver:
        tasks = [
            asyncio.create_task(driver.sample(prompts[i % 8], SamplingParams(20, seed=i)))
            for i in range(7)
        ]
        await asyncio.to_thread(engine.reached.wait, 60)
        engine.error = RuntimeError("device lost")
        engine.go.set()

        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, DriverError)
            assert "RuntimeError: device lost" in str(result)
            assert result.__cause__ is engine.error
        with pytest.raises(DriverError, match="device lost"):
            await driver.sample(prompts[0], SamplingParams(2))
        with pytest.raises(DriverError, match="device lost"):
            driver.set_weights(tiny.params[1], tiny.versions[1])


async def test_prefill_failure_reaches_the_request_that_was_being_admitted(tiny, prompts):
    class Broken(Gate):
        def prefill(self, *args):
            raise RuntimeError("out of memory")

    with driver_of(tiny, Broken(tiny.engine)) as driver:
        with pytest.raises(DriverError, match="out of memory"):
            await driver.sample(prompts[0], SamplingParams(2))


async def test_stop_fails_what_is_left_and_refuses_the_rest(tiny, prompts):
    engine = Gate(tiny.engine, hold_at=[1])
    driver = driver_of(tiny, engine)
    tasks = [
        asyncio.create_task(driver.sample(prompts[i], SamplingParams(20, seed=i))) for i in range(6)
    ]
    await _until(lambda: driver.stats().waiting == 6)
    driver.start()
    await asyncio.to_thread(engine.reached.wait, 60)
    await _until(lambda: driver.stats().waiting == 2)

    with pytest.raises(DeadlineError, match="did not end within"):
        await asyncio.to_thread(driver.stop, 0.05)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, DriverError)
    engine.go.set()
    driver.stop()
    driver.stop()
    with pytest.raises(DriverError, match="stopped"):
        await driver.sample(prompts[0], SamplingParams(2))


async def test_requests_before_start_are_served_after_it(tiny, prompts):
    driver = driver_of(tiny)
    future = driver.submit(prompts[0], SamplingParams(3, seed=1))
    with driver:
        got = await asyncio.wrap_future(future)
    np.testing.assert_array_equal(got.tokens, tiny.naive(prompts[0], SamplingParams(3, seed=1))[0])
    with pytest.raises(DriverError, match="started already"):
        driver.start()


async def test_one_device_read_per_dispatch_and_none_besides(tiny, prompts):
    with driver_of(tiny) as driver:
        before = driver.stats().dispatches
        with counting_host_syncs() as syncs:
            await asyncio.gather(
                *(driver.sample(prompts[i % 8], SamplingParams(9, seed=i)) for i in range(10))
            )
        dispatches = driver.stats().dispatches - before

    shapes = {read.shape for read in syncs.reads}
    assert syncs.count == dispatches
    assert shapes == {(4, tiny.engine.steps_per_dispatch, 4)}
    assert {read.thread for read in syncs.reads} == {"jaxrl-driver"}


async def test_serving_and_swapping_compile_nothing(tiny, prompts):
    compiled = []
    with driver_of(tiny, in_flight="recompute") as driver:
        await driver.sample(prompts[0], SamplingParams(2))
        count = driver.stats().compile_count
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
        )
        tasks = [
            asyncio.create_task(driver.sample(prompts[i % 8], SamplingParams(1 + i, seed=i)))
            for i in range(20)
        ]
        await asyncio.to_thread(driver.set_weights, tiny.params[1], tiny.versions[1])
        await asyncio.gather(*tasks)

        assert driver.stats().compile_count == count
    assert compiled == []


async def test_blocking_helpers_give_completions_and_text(tiny, prompts):
    class Numbers:
        eos_id = 1

        def encode(self, text):
            return [int(word) for word in text.split()]

        def decode(self, ids):
            return " ".join(map(str, ids))

    with driver_of(tiny, tokenizer=Numbers()) as driver:
        got = await asyncio.to_thread(driver.sample_blocking, prompts[1], SamplingParams(4, seed=2))
        text = await asyncio.to_thread(driver.generate, "3 4 5", max_tokens=5, temperature=0.0)

    np.testing.assert_array_equal(got.tokens, tiny.naive(prompts[1], SamplingParams(4, seed=2))[0])
    wanted = tiny.naive([3, 4, 5], SamplingParams(5, 0.0, stop_tokens=(1,)))[0]
    assert text == " ".join(str(t) for t in wanted if t != 1)
    assert got.text == " ".join(map(str, got.tokens))


async def test_generate_stops_at_every_stop_token_of_the_tokenizer(tiny):
    wanted = tiny.naive([3, 4, 5], SamplingParams(5, 1.0, seed=2))[0].tolist()

    class Numbers:
        eos_id, stop_ids = 1, (1, wanted[2])

        def encode(self, text):
            return [int(word) for word in text.split()]

        def decode(self, ids):
            return " ".join(map(str, ids))

    with driver_of(tiny, tokenizer=Numbers()) as driver:
        text = await asyncio.to_thread(driver.generate, "3 4 5", max_tokens=5, seed=2)

    assert wanted.index(wanted[2]) == 2
    assert text == " ".join(map(str, wanted[:2]))


async def test_blocking_sample_gives_up_at_its_deadline(tiny, prompts):
    engine = Gate(tiny.engine, hold_at=[1])
    with driver_of(tiny, engine) as driver:
        with pytest.raises(DeadlineError, match=r"timeout=0.05 s"):
            await asyncio.to_thread(
                driver.sample_blocking, prompts[0], SamplingParams(9), timeout=0.05
            )
        engine.go.set()


async def test_not_a_number_weights_fail_the_request_not_thedriver_of(tiny, prompts):
    broken = jax.tree.map(lambda x: x * np.nan, tiny.params[0])
    driver = Driver(tiny.engine, broken, tiny.versions[0], verify=False)
    with driver:
        with pytest.raises(DriverError, match="version 0 gave log-probability nan"):
            await driver.sample(prompts[0], SamplingParams(3))
        driver.set_weights(tiny.params[1], tiny.versions[1])
        got = await driver.sample(prompts[0], SamplingParams(3, seed=1))
    wanted = tiny.naive(prompts[0], SamplingParams(3, seed=1), version=1)[0]
    np.testing.assert_array_equal(got.tokens, wanted)


@pytest.mark.parametrize(
    "odd",
    [
        {"seed": np.int64(-1)},
        {"stop_tokens": frozenset({1, 2})},
        {"max_tokens": np.int8(5)},
        {"temperature": np.float32(0.5), "top_p": np.float64(0.5), "top_k": np.uint8(3)},
    ],
    ids=str,
)
async def test_request_in_numbers_of_another_kind_is_served_like_any_other(tiny, prompts, odd):
    params = SamplingParams(**{"max_tokens": 5, **odd})

    with driver_of(tiny) as driver:
        completion = await driver.sample(prompts[0], params)
        others = await driver.sample(prompts[1], SamplingParams(2))

    assert 1 <= len(completion.tokens) <= 5
    assert len(others.tokens) == 2

"""Who is let in: a bounded queue, time limits, and a driver that is being stopped."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from inference.gates import Gate, driver_of, until

from jaxrl.errors import DeadlineError, DriverError, QueueFullError, RequestError
from jaxrl.types import SamplingParams


def test_request_beyond_the_queue_is_refused_at_once_and_the_others_are_served(tiny, prompts):
    gate = Gate(tiny.engine, hold_at=[1])
    with driver_of(tiny, gate, max_waiting=2) as driver:
        running = [driver.submit(prompts[i], SamplingParams(6, seed=i)) for i in range(4)]
        assert gate.reached.wait(60)
        waiting = [driver.submit(prompts[i], SamplingParams(6, seed=i)) for i in range(2)]

        with pytest.raises(QueueFullError, match="max_waiting=2"):
            driver.submit(prompts[0], SamplingParams(6))
        refused = driver.stats().refused
        gate.go.set()
        served = [future.result(60) for future in (*running, *waiting)]
        later = driver.submit(prompts[0], SamplingParams(6)).result(60)

    assert refused == 1
    assert len(served) == 6
    np.testing.assert_array_equal(later.tokens, served[0].tokens)


def test_requests_that_find_a_free_slot_need_no_place_in_the_queue(tiny, prompts):
    driver = driver_of(tiny, max_waiting=0)

    futures = [driver.submit(prompts[i], SamplingParams(2)) for i in range(4)]
    with pytest.raises(QueueFullError):
        driver.submit(prompts[0], SamplingParams(2))
    with driver.start():
        completions = [future.result(60) for future in futures]

    assert [len(completion.tokens) for completion in completions] == [2] * 4


def test_request_whose_time_is_over_fails_and_frees_its_slot_or_place(tiny, prompts):
    gate = Gate(tiny.engine, hold_at=[1])
    with driver_of(tiny, gate) as driver:
        running = [
            driver.submit(prompts[i], SamplingParams(20, seed=i), timeout=0.3) for i in range(4)
        ]
        assert gate.reached.wait(60)
        waiting = driver.submit(prompts[0], SamplingParams(20), timeout=0.3)
        patient = driver.submit(prompts[0], SamplingParams(3))
        threading.Event().wait(0.4)
        gate.go.set()

        for future in (*running, waiting):
            with pytest.raises(DeadlineError, match="time is over"):
                future.result(60)
        completion = patient.result(60)
        until(lambda: driver.stats().running == 0)
        stats = driver.stats()

    np.testing.assert_array_equal(completion.tokens, tiny.naive(prompts[0], SamplingParams(3))[0])
    assert (stats.expired, stats.waiting, stats.cancelled) == (5, 0, 0)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_impossible_time_limit_is_refused(tiny, prompts, timeout):
    with pytest.raises(RequestError, match="must be positive"):
        driver_of(tiny).submit(prompts[0], SamplingParams(2), timeout=timeout)


def test_drain_finishes_what_is_there_and_admits_nothing_more(tiny, prompts):
    with driver_of(tiny) as driver:
        futures = [driver.submit(prompts[i], SamplingParams(12, seed=i)) for i in range(8)]

        drained = driver.drain(60)

        assert drained
        assert all(future.done() for future in futures)
        with pytest.raises(DriverError, match="being stopped"):
            driver.submit(prompts[0], SamplingParams(2))


def test_drain_and_stop_wait_without_a_limit_if_told_to(tiny, prompts):
    with driver_of(tiny) as driver:
        future = driver.submit(prompts[0], SamplingParams(2))

        drained = driver.drain(math.inf)
        driver.stop(math.inf)

    assert drained is True
    assert len(future.result(0).tokens) == 2


def test_drain_tells_when_its_time_was_not_enough(tiny, prompts):
    gate = Gate(tiny.engine, hold_at=[1])
    with driver_of(tiny, gate) as driver:
        future = driver.submit(prompts[0], SamplingParams(4))
        assert gate.reached.wait(60)

        drained = driver.drain(0.05)

        assert not drained
        gate.go.set()
        assert len(future.result(60).tokens) == 4


def test_drain_of_a_failing_driver_ends(tiny, prompts):
    gate = Gate(tiny.engine, hold_at=[1])
    with driver_of(tiny, gate) as driver:
        future = driver.submit(prompts[0], SamplingParams(4))
        assert gate.reached.wait(60)
        gate.error = RuntimeError("device lost")
        gate.go.set()

        assert driver.drain(60)

        with pytest.raises(DriverError, match="device lost"):
            future.result(60)


def test_end_of_the_driver_is_announced_with_its_failure(tiny, prompts):
    gate, ended = Gate(tiny.engine), threading.Event()
    gate.error = RuntimeError("device lost")
    with driver_of(tiny, gate) as driver:
        driver.add_done_callback(ended.set)
        healthy = driver.failure
        future = driver.submit(prompts[0], SamplingParams(4))

        assert ended.wait(60)

    assert healthy is None
    assert "device lost" in str(driver.failure)
    assert isinstance(driver.failure.__cause__, RuntimeError)
    assert isinstance(future.exception(), DriverError)


def test_orderly_stop_is_announced_without_a_failure(tiny):
    ended = threading.Event()
    with driver_of(tiny) as driver:
        driver.add_done_callback(ended.set)

    assert ended.is_set()
    assert driver.failure is None


@pytest.mark.parametrize("name", ["max_waiting", "prefix_cache_bytes", "prefill_budget"])
def test_negative_bounds_are_refused_by_name(tiny, name):
    with pytest.raises(ValueError, match=f"{name}=-1 must be at least 0"):
        driver_of(tiny, **{name: -1})


@pytest.mark.parametrize(("prompts_kept", "limit"), [(0, 0), (8, 64 << 20)])
def test_number_of_prompts_to_keep_is_deprecated_for_a_number_of_bytes(tiny, prompts_kept, limit):
    with pytest.warns(FutureWarning, match="prefix_cache_bytes bounds"):
        driver = driver_of(tiny, prefix_cache=prompts_kept)

    assert driver.stats().prefix_limit_bytes == limit

"""New weights while sequences are decoded: every token is what its stamped version says."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import weakref
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from jaxrl.errors import WeightVersionError
from jaxrl.inference.batcher import Batcher
from jaxrl.inference.driver import Driver
from jaxrl.inference.requests import Request
from jaxrl.types import SamplingParams, WeightVersion

POLICIES = ("finish", "continue", "recompute")


def _batcher(tiny, in_flight) -> Batcher:
    return Batcher(tiny.engine, tiny.params[0], 0, in_flight=in_flight)


def _requests(prompts, temperature, lengths) -> list[Request]:
    return [
        Request(i, prompt, SamplingParams(lengths[i], temperature, seed=50 + i), Future())
        for i, prompt in enumerate(prompts)
    ]


def _drain(batcher) -> None:
    while batcher.running:
        batcher.step()


def _check(tiny, in_flight, request) -> set[int]:
    """The recorded log-probabilities are those of the stamped versions -> the versions."""
    got = request.completion()
    temperature = request.params.temperature
    if in_flight == "continue":
        expected = tiny.mixed_cache_logprobs(request.prompt, got.tokens, got.versions, temperature)
    else:
        by_version = {
            version: tiny.logprobs(request.prompt, got.tokens, version, temperature)
            for version in set(got.versions.tolist())
        }
        expected = [by_version[int(v)][i] for i, v in enumerate(got.versions)]
    np.testing.assert_allclose(got.logprobs, expected, rtol=0, atol=1e-4)
    assert len(got.tokens) == request.params.max_tokens
    assert np.all(np.diff(got.versions) >= 0)
    return set(got.versions.tolist())


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("in_flight", POLICIES)
def test_logprobs_are_those_of_the_stamped_version(tiny, prompts, in_flight, temperature):
    batcher = _batcher(tiny, in_flight)
    old = _requests(prompts[5:8], temperature, [6, 14, 17])
    batcher.admit(old)
    batcher.step()

    batcher.swap(tiny.params[1], 1)
    new = _requests(prompts[1:2], temperature, [9])
    batcher.admit(new)
    batcher.step()
    batcher.swap(tiny.params[2], 2)
    _drain(batcher)

    seen = [_check(tiny, in_flight, request) for request in (*old, *new)]
    if in_flight == "finish":
        assert seen == [{0}, {0}, {0}, {1}]
    else:
        assert seen == [{0, 1}, {0, 1, 2}, {0, 1, 2}, {1, 2}]


@pytest.mark.parametrize("in_flight", POLICIES)
def test_tokens_before_a_swap_are_those_of_a_run_without_it(tiny, prompts, in_flight):
    plain, swapped = _batcher(tiny, in_flight), _batcher(tiny, in_flight)
    requests = [_requests(prompts[2:5], 1.0, [13, 13, 13]) for _ in range(2)]
    plain.admit(requests[0])
    swapped.admit(requests[1])
    swapped.step()
    swapped.swap(tiny.params[1], 1)
    _drain(plain)
    _drain(swapped)

    for a, b in zip(*requests, strict=True):
        a, b = a.completion(), b.completion()
        kept = int((b.versions == 0).sum())
        np.testing.assert_array_equal(a.tokens[:kept], b.tokens[:kept])
        np.testing.assert_allclose(a.logprobs[:kept], b.logprobs[:kept], rtol=0, atol=1e-5)
        # Four given out before the swap, and one drawn by then.
        assert kept == (13 if in_flight == "finish" else 5)


def test_finish_serves_two_versions_at_once_and_then_lets_the_old_weights_go(tiny, prompts):
    weights = jax.tree.map(lambda x: x + 0, tiny.params[1])
    alive = weakref.ref(jax.tree.leaves(weights)[0])
    batcher = Batcher(tiny.engine, weights, 1, in_flight="finish")
    del weights
    old = _requests(prompts[:2], 1.0, [9, 9])
    batcher.admit(old)
    batcher.step()
    batcher.swap(tiny.params[2], 2)
    new = _requests(prompts[2:4], 1.0, [9, 9])
    batcher.admit(new)
    before = batcher.counts.dispatches

    batcher.step()

    assert batcher.counts.dispatches == before + 2
    assert batcher.live_versions == (1, 2)
    _drain(batcher)
    gc.collect()
    assert batcher.live_versions == (2,)
    assert alive() is None
    for request in old:
        np.testing.assert_array_equal(
            request.completion().tokens, tiny.naive(request.prompt, request.params, 1)[0]
        )
    for request in new:
        np.testing.assert_array_equal(
            request.completion().tokens, tiny.naive(request.prompt, request.params, 2)[0]
        )


@pytest.mark.parametrize("in_flight", POLICIES)
def test_prefix_cache_never_serves_keys_of_older_weights(tiny, prompts, in_flight):
    batcher = _batcher(tiny, in_flight)
    batcher.admit(_requests(prompts[5:6], 1.0, [2]))
    _drain(batcher)
    batcher.swap(tiny.params[1], 1)
    after = _requests(prompts[5:6], 1.0, [5])
    batcher.admit(after)
    _drain(batcher)

    assert batcher.counts.prefix_hits == 0
    np.testing.assert_array_equal(
        after[0].completion().tokens, tiny.naive(prompts[5], after[0].params, 1)[0]
    )


@pytest.mark.parametrize("in_flight", POLICIES)
def test_driver_swaps_between_dispatches_while_requests_run(tiny, prompts, in_flight):
    params = [SamplingParams(20, 1.0, seed=i) for i in range(6)]

    async def main(driver):
        tasks = [asyncio.create_task(driver.sample(prompts[i], params[i])) for i in range(6)]
        while driver.stats().tokens == 0:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(driver.set_weights, tiny.params[1], tiny.versions[1])
        return await asyncio.gather(*tasks)

    with Driver(tiny.engine, tiny.params[0], tiny.versions[0], in_flight=in_flight) as driver:
        completions = asyncio.run(main(driver))
        assert driver.version == tiny.versions[1]
        later = driver.sample_blocking(prompts[0], params[0])

    np.testing.assert_array_equal(later.versions, np.ones(20))
    np.testing.assert_array_equal(later.tokens, tiny.naive(prompts[0], params[0], 1)[0])
    for prompt, wanted, got in zip(prompts, params, completions, strict=False):
        request = Request(0, prompt, wanted, Future())
        bits = got.logprobs.view(np.int32)
        rows = np.stack([got.tokens, np.ones(20, np.int32), got.versions, bits], -1)
        request.take(rows.astype(np.int32))
        _check(tiny, in_flight, request)


def test_wrong_digest_is_refused_and_the_old_weights_go_on_serving(tiny, prompts):
    lie = dataclasses.replace(tiny.versions[2], number=1)
    with Driver(tiny.engine, tiny.params[0], tiny.versions[0]) as driver:
        with pytest.raises(WeightVersionError):
            driver.set_weights(tiny.params[1], lie)
        got = driver.sample_blocking(prompts[0], SamplingParams(4, seed=1))

    assert driver.version == tiny.versions[0]
    np.testing.assert_array_equal(got.tokens, tiny.naive(prompts[0], SamplingParams(4, seed=1))[0])
    with pytest.raises(WeightVersionError):
        Driver(tiny.engine, tiny.params[0], tiny.versions[1])


def test_version_number_beyond_32_bits_is_refused_and_the_driver_goes_on(tiny, prompts):
    with Driver(tiny.engine, tiny.params[0], tiny.versions[0], verify=False) as driver:
        with pytest.raises(WeightVersionError, match="2147483648 must be an integer of 32 bits"):
            driver.set_weights(tiny.params[1], WeightVersion(2**31, "any"))
        completion = driver.submit(prompts[0], SamplingParams(2)).result(60)

    np.testing.assert_array_equal(completion.versions, [0, 0])


def test_version_numbers_must_not_fall(tiny):
    driver = Driver(tiny.engine, tiny.params[1], tiny.versions[1])

    with pytest.raises(WeightVersionError, match=r"v0:.* older than the present v1:"):
        driver.set_weights(tiny.params[0], tiny.versions[0])
    other = dataclasses.replace(tiny.versions[2], number=1)
    with pytest.raises(WeightVersionError, match="one number but differ"):
        driver.set_weights(tiny.params[2], other)
    driver.set_weights(tiny.params[1], tiny.versions[1])
    driver.set_weights(tiny.params[2], tiny.versions[2])
    assert driver.version == tiny.versions[2]


def test_unknown_policy_is_refused_with_the_known_ones(tiny):
    with pytest.raises(ValueError, match="in_flight='maybe' must be one of finish, continue, reco"):
        Driver(tiny.engine, tiny.params[0], tiny.versions[0], in_flight="maybe")


def test_swaps_from_several_threads_end_on_the_highest_version(tiny, prompts):
    with Driver(tiny.engine, tiny.params[0], tiny.versions[0]) as driver:

        def swap(number):
            try:
                driver.set_weights(tiny.params[number], tiny.versions[number])
            except WeightVersionError:
                assert number == 1

        threads = [threading.Thread(target=swap, args=(n,)) for n in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert driver.version == tiny.versions[2]
        got = driver.sample_blocking(prompts[0], SamplingParams(3, seed=1))
    np.testing.assert_array_equal(got.versions, [2, 2, 2])

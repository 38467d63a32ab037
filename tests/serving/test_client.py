"""The sampler that asks servers: what it returns, repeats, proves and refuses."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest
from serving.relay import relay
from serving.servers import serving, until

from jaxrl.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineError,
    DriverError,
    RequestError,
    WeightVersionError,
)
from jaxrl.serving.client import MAX_CUTS, Needs, RemoteSampler
from jaxrl.types import SamplingParams, WeightVersion

PROMPT = np.array([104, 70, 60, 100, 31], np.int32)
NEEDS = Needs(16, {"d_model": 32})
PARAMS = SamplingParams(8, temperature=0.7, seed=2**62 + 1, stop_tokens=(5,))


class Following:
    """A follower whose run has what the server serves."""

    loading, problem = None, ""

    def __init__(self, backend):
        self._backend = backend

    def look(self):
        return 1

    def newest(self, ticket):
        return self._backend.driver.version


@contextlib.contextmanager
def following(driver, **options):
    """A server that follows a run."""
    with serving(driver, **options) as server:
        server.backend.model_meaning = {"d_model": 32}
        server.backend.follows = True
        server.backend.follower = Following(server.backend)
        yield server


@contextlib.contextmanager
def asking(*servers, version=None, needs=NEEDS, **options):
    """A sampler that asks these servers, for which `version` was published."""
    options = {"wait_s": 60.0, **options}
    sampler = RemoteSampler([server.url for server in servers], needs, **options)
    sampler.start()
    try:
        if version is not None:
            sampler.publish(version, oldest=version.number)
        yield sampler
    finally:
        sampler.stop()


@pytest.fixture(scope="module")
def server(tiny):
    """A server that follows a run, for the tests that leave it as it was."""
    with tiny.driver() as driver, following(driver, template=tiny.chat) as server:
        yield server


@pytest.fixture
def between(server):
    """A relay before that server."""
    with relay(server.url) as between:
        yield between


def assert_same(completion, expected):
    np.testing.assert_array_equal(completion.tokens, expected.tokens)
    np.testing.assert_array_equal(completion.versions, expected.versions)
    # The bits: they become weights of the loss.
    np.testing.assert_array_equal(completion.logprobs, expected.logprobs)
    assert completion.finish_reason == expected.finish_reason
    assert completion.text == expected.text


@pytest.mark.parametrize("stop", [(), (5,), "first"])
def test_completion_is_the_one_that_the_driver_gives(tiny, server, stop):
    driver = server.backend.driver
    free = driver.sample_blocking(PROMPT, dataclasses.replace(PARAMS, stop_tokens=()))
    stop = (int(free.tokens[2]),) if stop == "first" else stop
    params = dataclasses.replace(PARAMS, stop_tokens=stop)

    with asking(server, version=tiny.versions[0], tokenizer=tiny.tokenizer) as sampler:
        sampler.wait_until_ready()
        completion = asyncio.run(sampler.sample(PROMPT, params))

    assert_same(completion, driver.sample_blocking(PROMPT, params))
    assert sampler.tokens == len(completion.tokens)


def test_requests_are_spread_over_the_servers(tiny):
    async def many(sampler):
        return await asyncio.gather(*(sampler.sample(PROMPT, PARAMS) for _ in range(8)))

    with contextlib.ExitStack() as stack:
        drivers = [stack.enter_context(tiny.driver()) for _ in range(2)]
        servers = [stack.enter_context(following(driver)) for driver in drivers]
        sampler = stack.enter_context(asking(*servers, version=tiny.versions[0]))
        sampler.wait_until_ready()
        asyncio.run(many(sampler))
        finished = [driver.stats().finished for driver in drivers]

    assert finished == [4, 4]


@pytest.mark.parametrize("trouble", ["cut", 500, 502, 504])
def test_request_that_is_cut_is_asked_again_with_the_same_seed(tiny, between, trouble):
    between.script = [trouble] * 2

    with asking(between, version=tiny.versions[0]) as sampler:
        completion = sampler.sample_blocking(PROMPT, PARAMS)

    assert [body["seed"] for body in between.bodies] == [PARAMS.seed] * 3
    assert len(completion.tokens) == 8


def test_request_that_is_cut_again_and_again_is_an_error_that_names_the_server(tiny, between):
    between.script = [500] * (MAX_CUTS + 1)

    with asking(between, version=tiny.versions[0]) as sampler:
        with pytest.raises(DriverError, match=f"{between.url} .* cut one request 6 times.*500"):
            sampler.sample_blocking(PROMPT, PARAMS)


@pytest.mark.parametrize("status", [429, 503])
def test_busy_server_is_asked_again_however_often_it_is_busy(tiny, between, status):
    between.script = [status] * (MAX_CUTS + 2)

    with asking(between, version=tiny.versions[0]) as sampler:
        completion = sampler.sample_blocking(PROMPT, PARAMS)

    assert len(between.bodies) == MAX_CUTS + 3
    assert len(completion.tokens) == 8


def test_what_a_server_refuses_is_an_error_that_names_it_and_is_not_repeated(tiny, between):
    with asking(between, version=tiny.versions[0]) as sampler:
        with pytest.raises(RequestError, match=rf"{between.url} refuses: temperature=7\.0"):
            sampler.sample_blocking(PROMPT, dataclasses.replace(PARAMS, temperature=7.0))

    assert len(between.bodies) == 1


def test_alternatives_are_refused_before_anything_is_asked(tiny, between):
    with asking(between, version=tiny.versions[0]) as sampler:
        with pytest.raises(RequestError, match="top_logprobs=2 must be 0"):
            sampler.sample_blocking(PROMPT, dataclasses.replace(PARAMS, top_logprobs=2))

    assert between.bodies == []


def test_cancelled_sample_frees_the_slot_on_the_server(tiny, gate):
    async def leave(sampler):
        task = asyncio.create_task(sampler.sample(PROMPT, PARAMS))
        await asyncio.to_thread(gate.reached.wait, 60)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with tiny.driver(gate) as driver, following(driver) as server:
        with asking(server, version=tiny.versions[0]) as sampler:
            asyncio.run(leave(sampler))
            until(lambda: server.metrics.outcomes["cancelled"] == 1, "the cancellation")
            gate.open.set()
            until(lambda: not driver.stats().running, "the free slot")
            sampler.sample_blocking(PROMPT, PARAMS)

            assert driver.stats().finished == 1


def test_calls_to_a_server_that_no_longer_answers_are_made_elsewhere(tiny, server, between):
    between.script = ["hang"]

    with asking(between, version=tiny.versions[0]) as sampler:
        future = sampler._submit(PROMPT, PARAMS, None)
        assert between.hanging.wait(60)
        between.deaf = True
        until(lambda: not future.done() and "has not answered" in sampler.describe(), "the loss")
        between.deaf = False
        completion = future.result(60)

    assert_same(
        dataclasses.replace(completion, text=""),
        dataclasses.replace(server.backend.driver.sample_blocking(PROMPT, PARAMS), text=""),
    )


def _choice(**changes):
    def change(answer):
        answer["choices"][0] |= changes
        return answer

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: "no JSON",
        lambda answer: "[" * 100_000,
        lambda answer: {},
        lambda answer: [],
        lambda answer: answer | {"choices": []},
        lambda answer: answer | {"weight_versions": []},
        _choice(token_ids=[]),
        _choice(token_ids=[1, 2, 3]),
        _choice(token_ids=["a"] * 8),
        _choice(token_ids=[2**31] * 8),
        _choice(finish_reason="stop"),
        _choice(finish_reason=None),
        _choice(logprobs=None),
        _choice(logprobs={"token_logprobs": [None] * 8, "versions": [0] * 8}),
        _choice(logprobs={"token_logprobs": [-1e39] * 8, "versions": [0] * 8}),
        _choice(logprobs={"token_logprobs": [-1.0] * 8, "versions": [1] * 8}),
    ],
)
def test_answer_that_makes_no_sense_is_an_error_that_names_the_server(tiny, between, change):
    between.script = [change]

    with asking(between, version=tiny.versions[0]) as sampler:
        with pytest.raises(DriverError, match=f"{between.url} gave an answer that makes no sense"):
            sampler.sample_blocking(PROMPT, PARAMS)


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: "no JSON",
        lambda answer: "[" * 100_000,
        lambda answer: [],
        lambda answer: {"state": "ready"},
        lambda answer: answer | {"serving": 3},
        lambda answer: answer | {"serving": {"number": -1, "digest": "a"}},
        lambda answer: answer | {"loading": [1]},
        lambda answer: answer | {"room": 0},
        lambda answer: answer | {"max_length": float("inf")},
        lambda answer: answer | {"follows": "no"},
        lambda answer: answer | {"model_meaning": 5},
    ],
)
def test_weights_that_make_no_sense_are_an_error_that_names_the_server(tiny, between, change):
    between.told = change

    with asking(between, version=tiny.versions[0]) as sampler:
        with pytest.raises(DriverError, match=f"{between.url} gave an answer that makes no sense"):
            sampler.sample_blocking(PROMPT, PARAMS)


@pytest.mark.parametrize("digest", ["0" * 64, ""])
def test_token_of_other_weights_than_published_is_an_error_with_both_digests(tiny, between, digest):
    between.script = [lambda a: a | {"weight_versions": [{"number": 0, "digest": digest}]}]

    with asking(between, version=tiny.versions[0]) as sampler:
        with pytest.raises(WeightVersionError) as error:
            sampler.sample_blocking(PROMPT, PARAMS)

    assert f"{between.url} sampled from version 0" in str(error.value)
    assert (digest or "unknown") in str(error.value)
    assert tiny.versions[0].digest in str(error.value)


def test_server_of_another_run_is_refused_with_both_digests(tiny, server):
    with asking(server, version=WeightVersion(0, "f" * 64)) as sampler:
        with pytest.raises(WeightVersionError) as error:
            sampler.wait_until_ready()

    assert server.url in str(error.value)
    assert "f" * 64 in str(error.value)
    assert tiny.versions[0].digest in str(error.value)


def test_server_that_lags_gets_no_requests_and_is_named(tiny, server):
    with asking(server, version=tiny.versions[0], wait_s=0.5) as sampler:
        sampler.wait_until_ready()
        later = WeightVersion(3, "a" * 64)
        sampler.publish(later, oldest=2)
        with pytest.raises(DeadlineError, match=rf"version 2 or .*{server.url} serves v0:"):
            sampler.sample_blocking(PROMPT, PARAMS)
        sampler.publish(later, oldest=0)
        completion = sampler.sample_blocking(PROMPT, PARAMS)

    assert set(completion.versions.tolist()) == {0}


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (Needs(500, {"d_model": 32}), "takes sequences of 128 tokens, and the run samples 500"),
        (Needs(16, {"d_model": 64}), "serves a model with d_model=32, the run's has 64"),
    ],
)
def test_server_that_does_not_fit_is_refused_with_both_numbers(server, needs, message):
    with asking(server, needs=needs) as sampler:
        with pytest.raises(ConfigError, match=f"rollout.samplers: {server.url} {message}"):
            sampler.wait_until_reached()


def test_server_that_follows_no_run_is_refused(tiny):
    with tiny.driver() as driver, serving(driver) as server, asking(server) as sampler:
        with pytest.raises(ConfigError, match=f"{server.url} follows no run"):
            sampler.wait_until_reached()


def test_server_with_another_token_is_refused(tiny, between):
    with tiny.driver() as driver, following(driver, token="right-token") as server:
        with asking(server, token="right-token", version=tiny.versions[0]) as sampler:
            sampler.sample_blocking(PROMPT, PARAMS)
        with asking(server, token="wrong-token") as sampler:
            with pytest.raises(AuthenticationError, match=f"{server.url}: the token is not"):
                sampler.wait_until_reached()


def test_server_that_loads_counts_as_reached_and_not_as_ready(tiny):
    with serving(None) as server, asking(server, version=tiny.versions[0], wait_s=0.5) as sampler:
        sampler.wait_until_reached()
        with pytest.raises(DeadlineError, match=f"{server.url} is loading"):
            sampler.wait_until_ready()


def test_pinned_sampler_asks_only_servers_with_its_version(tiny, server):
    with asking(server, version=tiny.versions[0], wait_s=0.5) as sampler:
        pinned = sampler.sampler_of(tiny.versions[0])
        completion = pinned.sample_blocking(PROMPT, PARAMS)
        sampler.publish(WeightVersion(1, "a" * 64), oldest=0)
        with pytest.raises(DeadlineError, match="that serve version 1"):
            sampler.sampler_of(WeightVersion(1, "a" * 64))

    assert set(completion.versions.tolist()) == {0}

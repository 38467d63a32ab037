"""Whoever else is there, a request gets the tokens and log-probabilities that it gets alone."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inference.conftest import LENGTH, VOCAB, Tiny

from jaxrl.inference.batcher import Batcher
from jaxrl.inference.engine import Engine
from jaxrl.inference.requests import Limits, Request, check_request
from jaxrl.types import SamplingParams

_RNG = np.random.default_rng(11)
_TEXT = _RNG.integers(0, VOCAB, 64).astype(np.int32)
_ROOM = 36

_settings = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def served(tiny) -> Tiny:
    """The tiny model behind an engine with several buckets of everything."""
    engine = Engine(
        tiny.model,
        slots=3,
        max_length=LENGTH,
        prefill_chunk=8,
        prefill_buckets=(2, 4),
        prefill_rows=2,
        attend_buckets=(16, 32),
        steps_per_dispatch=4,
        max_stop_tokens=2,
        top_logprobs=3,
    )
    engine.warm_up()
    return dataclasses.replace(tiny, engine=engine)


@dataclasses.dataclass
class Alone:
    """What requests get that have an engine for themselves; computed once for each."""

    served: Tiny
    known: dict = dataclasses.field(default_factory=dict)

    def __call__(self, prompt, params, version=0):
        """The completion of one request under the weights of a version."""
        key = (prompt.tobytes(), params, version)
        if key not in self.known:
            batcher = Batcher(
                self.served.engine, self.served.params[version], version, in_flight="continue"
            )
            request = _request(prompt, params)
            batcher.admit([request])
            while not request.finished:
                batcher.step()
            self.known[key] = request.completion()
        return self.known[key]


@pytest.fixture(scope="module")
def alone(served) -> Alone:
    return Alone(served)


def _request(prompt, params) -> Request:
    prompt, params = check_request(prompt, params, Limits(VOCAB, LENGTH, 2, 3))
    return Request(0, prompt, params, Future())


@st.composite
def _jobs(draw):
    """A prompt and how to sample it; many prompts begin alike."""
    start = draw(st.sampled_from([0, 0, 0, 5]))
    prompt = _TEXT[start : start + draw(st.integers(1, _ROOM))]
    if draw(st.booleans()):
        prompt = np.concatenate([prompt[:-1], [draw(st.integers(0, VOCAB - 1))]])
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 10)),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        seed=draw(st.integers(0, 3)),
        stop_tokens=draw(st.sampled_from([(), (3,), (3, 17)])),
        top_k=draw(st.sampled_from([0, 0, 4])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
        top_logprobs=draw(st.sampled_from([0, 0, 2])),
    )
    return prompt.astype(np.int32), params


@st.composite
def _schedules(draw):
    """Requests, after how many turns each arrives, and which are cancelled after how many more."""
    jobs = draw(st.lists(_jobs(), min_size=1, max_size=9))
    arrivals = sorted(draw(st.integers(0, 6)) for _ in jobs)
    leaves = [draw(st.sampled_from([None, None, None, 0, 1, 3])) for _ in jobs]
    return jobs, arrivals, leaves


def _play(batcher, schedule, before_turn=lambda turn: None):
    """Plays a schedule -> the requests; those that were cancelled are left unfinished."""
    jobs, arrivals, leaves = schedule
    requests = [_request(*job) for job in jobs]
    waiting, turn = [], 0
    coming = list(zip(arrivals, requests, leaves, strict=True))
    leaving = {}
    while coming or waiting or batcher.running:
        before_turn(turn)
        while coming and coming[0][0] <= turn:
            arrival, request, leave = coming.pop(0)
            waiting.append(request)
            if leave is not None:
                leaving[id(request)] = arrival + leave
        gone = {key for key, when in leaving.items() if when <= turn}
        waiting = [request for request in waiting if id(request) not in gone]
        batcher.drop(lambda request, gone=gone: id(request) in gone)
        room = len(batcher.free_slots)
        batcher.admit(waiting[:room])
        waiting = waiting[room:]
        batcher.step(waiting)
        turn += 1
    return requests


def _assert_same(completion, expected):
    np.testing.assert_array_equal(completion.tokens, expected.tokens)
    np.testing.assert_allclose(completion.logprobs, expected.logprobs, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(completion.versions, expected.versions)
    assert completion.finish_reason == expected.finish_reason
    if expected.top_tokens is None:
        assert completion.top_tokens is None
    else:
        np.testing.assert_array_equal(completion.top_tokens, expected.top_tokens)


@_settings
@given(schedule=_schedules(), budget=st.sampled_from([None, 0, 8]), kept=st.sampled_from([None, 0]))
def test_request_gets_what_it_gets_alone_whatever_the_schedule(
    served, alone, schedule, budget, kept
):
    batcher = Batcher(
        served.engine,
        served.params[0],
        0,
        in_flight="continue",
        prefill_budget=budget,
        prefix_cache_bytes=kept,
    )

    requests = _play(batcher, schedule)

    assert batcher.free_slots == [0, 1, 2]
    for request, leave in zip(requests, schedule[2], strict=True):
        if request.finished:
            _assert_same(request.completion(), alone(request.prompt, request.params))
        else:
            assert leave is not None


@_settings
@given(
    schedule=_schedules(),
    in_flight=st.sampled_from(["finish", "continue", "recompute"]),
    swaps=st.lists(st.integers(0, 12), max_size=2, unique=True),
    budget=st.sampled_from([None, 0]),
)
def test_every_token_carries_the_version_whose_logprob_it_has(
    served, schedule, in_flight, swaps, budget
):
    batcher = Batcher(
        served.engine, served.params[0], 0, in_flight=in_flight, prefill_budget=budget
    )

    def swap(turn):
        if turn in swaps:
            number = batcher.version + 1
            batcher.swap(served.params[number], number)

    requests = _play(batcher, schedule, swap)

    assert batcher.live_versions == (batcher.version,)
    for request in requests:
        if not request.finished:
            continue
        completion = request.completion()
        assert (np.diff(completion.versions) >= 0).all()
        if in_flight == "finish":
            assert len(set(completion.versions)) == 1
        if not request.params.temperature or request.params == _whole(request.params):
            _assert_logprobs(served, request, completion, in_flight)
        elif in_flight != "continue":
            _assert_cut_logprobs(served, request, completion)


def _assert_logprobs(served, request, completion, in_flight):
    """Recomputed under the stamped versions: alone, or over the cache that earlier ones left."""
    prompt, temperature = request.prompt, request.params.temperature
    if in_flight == "continue":
        expected = served.mixed_cache_logprobs(
            prompt, completion.tokens, completion.versions, temperature
        )
    else:
        by_version = {
            version: served.logprobs(prompt, completion.tokens, version, temperature)
            for version in set(completion.versions.tolist())
        }
        expected = [by_version[v][i] for i, v in enumerate(completion.versions.tolist())]
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


def _whole(params):
    """The same without top-k and top-p."""
    return dataclasses.replace(params, top_k=0, top_p=1.0)


def _assert_cut_logprobs(served, request, completion):
    """Recomputed under the stamped versions over what top-k and top-p leave, by sorting."""
    params, sequence = request.params, list(request.prompt)
    for i, (token, version) in enumerate(
        zip(completion.tokens.tolist(), completion.versions.tolist(), strict=True)
    ):
        logits = served.logits(sequence, version).astype(np.float64) / params.temperature
        probabilities = np.exp(logits - logits.max())
        order = np.argsort(-probabilities, kind="stable")[: params.top_k or None]
        shares = np.cumsum(probabilities[order]) / probabilities[order].sum()
        last = int(np.searchsorted(shares, params.top_p))
        # Where rounding decides about the last token, either is right.
        if last >= len(shares) or abs(shares[last] - params.top_p) > 1e-5:
            kept = order[: last + 1]
            assert token in kept
            expected = np.log(probabilities[token] / probabilities[kept].sum())
            np.testing.assert_allclose(completion.logprobs[i], expected, rtol=0, atol=1e-4)
        sequence.append(token)


@_settings
@given(schedule=_schedules())
def test_nothing_compiles_under_a_random_load(served, schedule):
    before = served.engine.compile_count

    _play(Batcher(served.engine, served.params[0], 0, in_flight="recompute"), schedule)

    assert served.engine.compile_count == before

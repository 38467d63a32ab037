"""Prompts computed piece by piece, between dispatches, and served again from what was kept."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

import numpy as np
import pytest
from host_sync import counting_host_syncs
from inference.conftest import LENGTH, VOCAB, Tiny

from jaxrl.inference.arguments import Entry, Piece
from jaxrl.inference.batcher import Batcher
from jaxrl.inference.engine import Engine
from jaxrl.inference.requests import Limits, Request, check_request
from jaxrl.inference.streaming import Channel
from jaxrl.models.model import build_model, stack_layers
from jaxrl.sharding import make_mesh
from jaxrl.types import SamplingParams
from jaxrl.weights.exchange import copy_to

CHUNK = 8

WINDOWS = {"sliding_window": 10, "global_every": 2, "attention_softcap": 20.0}


@pytest.fixture(scope="module")
def pieced(tiny) -> Tiny:
    """The tiny model behind an engine that takes prompts in pieces of 8 tokens."""
    return dataclasses.replace(tiny, engine=_engine(tiny.model))


def _engine(model, **options):
    sizes = {"slots": 4, "max_length": LENGTH, "attend_buckets": (), "steps_per_dispatch": 4}
    engine = Engine(
        model, prefill_chunk=CHUNK, prefill_buckets=(4,), prefill_rows=2, **{**sizes, **options}
    )
    engine.warm_up()
    return engine


def _batcher(tiny, **options):
    return Batcher(tiny.engine, tiny.params[0], 0, in_flight="continue", **options)


def _request(number, prompt, params, *, streamed=False):
    prompt, params = check_request(prompt, params, Limits(VOCAB, LENGTH, 2))
    return Request(number, prompt, params, Future(), Channel() if streamed else None)


def _finish(batcher, requests):
    """Admit and decode all of them -> their completions, in order."""
    waiting = list(requests)
    while waiting or batcher.running:
        room = len(batcher.free_slots)
        batcher.admit(waiting[:room])
        waiting = waiting[room:]
        batcher.step(waiting)
    return [request.completion() for request in requests]


def _prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 25, 40])
def test_prompt_in_pieces_gives_the_tokens_of_a_full_forward(pieced, length):
    prompt, params = _prompt(length), SamplingParams(8, 1.0, seed=length)

    (completion,) = _finish(_batcher(pieced), [_request(0, prompt, params)])

    tokens, logprobs = pieced.naive(prompt, params)
    np.testing.assert_array_equal(completion.tokens, tokens)
    np.testing.assert_allclose(completion.logprobs, logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("scan_layers", "shape"),
    [
        pytest.param(False, {}, marks=pytest.mark.slow),
        pytest.param(True, {}, marks=pytest.mark.slow),
        pytest.param(False, WINDOWS, marks=pytest.mark.slow),
        (True, WINDOWS),
    ],
)
def test_pieces_on_a_mesh_and_with_windows_equal_one_full_forward(
    tiny, tiny_config, scan_layers, shape
):
    config = dataclasses.replace(tiny_config, scan_layers=scan_layers, **shape)
    model = build_model(config)
    params = tiny.params[0]
    if scan_layers:
        params = stack_layers(params)
    mesh = make_mesh(data=4, tensor=2)
    engine = _engine(model, mesh=mesh, slots=4)
    params = copy_to(params, engine.param_shardings)
    prompt, sampling = _prompt(29, seed=3), SamplingParams(6, 0.7, seed=5)
    batcher = Batcher(engine, params, 0, in_flight="continue")

    completions = _finish(
        batcher,
        [_request(0, _prompt(12), sampling), *(_request(i, prompt, sampling) for i in (1, 2, 3))],
    )

    # One device, one full forward for each token.
    alone = dataclasses.replace(
        tiny, model=build_model(dataclasses.replace(config, scan_layers=False))
    )
    tokens, logprobs = alone.naive(prompt, sampling)
    for completion in completions[1:]:
        np.testing.assert_array_equal(completion.tokens, tokens)
        np.testing.assert_allclose(completion.logprobs, logprobs, rtol=0, atol=1e-4)


def test_later_prompt_reuses_the_pieces_it_shares_and_gives_the_same_numbers(pieced):
    system = _prompt(17, seed=1)
    first, second = (np.concatenate([system, _prompt(5, seed=s)]) for s in (2, 3))
    params = SamplingParams(6, 1.0, seed=4)
    batcher = _batcher(pieced)

    _finish(batcher, [_request(0, first, params)])
    before = batcher.counts.prefix_hit_tokens
    (shared,) = _finish(batcher, [_request(1, second, params)])

    # Two whole pieces of 8 tokens stand in both prompts.
    assert (before, batcher.counts.prefix_hit_tokens) == (0, 16)
    (alone,) = _finish(_batcher(pieced), [_request(0, second, params)])
    np.testing.assert_array_equal(shared.tokens, alone.tokens)
    np.testing.assert_array_equal(shared.logprobs, alone.logprobs)


def test_next_turn_of_a_conversation_reuses_the_turn_before(pieced):
    params = SamplingParams(4, 1.0, seed=4)
    batcher = _batcher(pieced)
    turn = _prompt(10, seed=1)
    hits = []

    for _ in range(3):
        before = batcher.counts.prefix_hit_tokens
        (completion,) = _finish(batcher, [_request(0, turn, params)])
        hits.append(batcher.counts.prefix_hit_tokens - before)
        turn = np.concatenate([turn, completion.tokens, _prompt(3, seed=len(turn))])

    # Prompts of 10, 17 and 24 tokens: whole pieces of the prompt before.
    assert hits == [0, 8, 16]


def test_group_of_a_long_prompt_is_computed_once_for_all_its_slots(pieced):
    prompt = _prompt(21)
    batcher = _batcher(pieced)

    completions = _finish(
        batcher, [_request(i, prompt, SamplingParams(5, 1.0, seed=i)) for i in range(6)]
    )

    assert batcher.counts.prefills == 1
    assert (batcher.counts.prefix_hits, batcher.counts.prefix_hit_tokens) == (5, 5 * 21)
    for i, completion in enumerate(completions):
        tokens, _ = pieced.naive(prompt, SamplingParams(5, 1.0, seed=i))
        np.testing.assert_array_equal(completion.tokens, tokens)


def test_pieces_beyond_the_memory_bound_make_room_for_later_ones(pieced):
    probe = _batcher(pieced)
    _finish(probe, [_request(0, _prompt(8), SamplingParams(1))])
    one = probe.prefixes.nbytes
    batcher = _batcher(pieced, prefix_cache_bytes=3 * one)
    prompts = [_prompt(8, seed=i) for i in range(5)]

    for prompt in prompts:
        _finish(batcher, [_request(0, prompt, SamplingParams(1))])
        assert batcher.prefixes.nbytes <= 3 * one
    _finish(batcher, [_request(0, prompts[4], SamplingParams(1))])
    kept = batcher.counts.prefix_hits
    _finish(batcher, [_request(0, prompts[0], SamplingParams(1))])

    assert one > 0
    assert len(batcher.prefixes) == 3
    assert batcher.prefixes.evictions == 3
    assert (kept, batcher.counts.prefix_hits) == (1, 1)


def test_no_bytes_for_prefixes_keeps_none(pieced):
    batcher = _batcher(pieced, prefix_cache_bytes=0)

    for _ in range(2):
        _finish(batcher, [_request(0, _prompt(20), SamplingParams(2))])

    assert batcher.counts.prefix_hit_tokens == 0
    assert len(batcher.prefixes) == 0


def test_long_prompt_lets_running_streams_go_on_between_its_pieces(pieced):
    batcher = _batcher(pieced, prefill_budget=CHUNK)
    running = _request(0, _prompt(3), SamplingParams(40, 1.0), streamed=True)
    batcher.admit([running])
    batcher.step()
    batcher.admit([_request(1, _prompt(40, seed=9), SamplingParams(2))])

    given = []
    while batcher._jobs:
        before = running.given
        batcher.step()
        given.append(running.given - before)

    # 40 tokens in calls of 8 (two rows each): one call, then some tokens, and so on.
    assert len(given) == 5
    assert min(given) >= 1


@pytest.mark.parametrize("streamed", [False, True])
def test_host_reads_first_tokens_only_for_those_who_read_along(pieced, streamed):
    batcher = _batcher(pieced)
    batcher.admit(
        [_request(i, _prompt(3 + i), SamplingParams(9), streamed=streamed) for i in (0, 1)]
    )

    with counting_host_syncs() as first:
        batcher.step()
    with counting_host_syncs() as second:
        batcher.step()

    assert (first.count, second.count) == (1 + streamed, 1)


def test_without_running_sequences_the_budget_delays_nothing(pieced):
    batcher = _batcher(pieced, prefill_budget=CHUNK)
    batcher.admit([_request(0, _prompt(40), SamplingParams(2))])

    done = batcher.step()

    assert [request.given for request in done] == [2]


def test_cancelled_leader_hands_what_it_has_computed_to_the_next_of_its_group(pieced):
    prompt, params = _prompt(40), SamplingParams(4, 1.0, seed=1)
    batcher = _batcher(pieced, prefill_budget=CHUNK, prefix_cache_bytes=0)
    busy = _request(9, _prompt(2), SamplingParams(40))
    batcher.admit([busy])
    batcher.step()
    leader, follower = (_request(i, prompt, params) for i in range(2))
    batcher.admit([leader, follower])
    batcher.step()
    batcher.step()

    batcher.drop(lambda request: request is leader)
    # Somebody else takes the leader's slot at once.
    batcher.admit([_request(5, _prompt(11, seed=5), SamplingParams(3))])
    while not follower.finished:
        batcher.step()

    tokens, _ = pieced.naive(prompt, params)
    np.testing.assert_array_equal(follower.completion().tokens, tokens)


@pytest.mark.parametrize("in_flight", ["finish", "continue", "recompute"])
def test_weights_that_change_inside_a_prompt_leave_no_mixed_piece(pieced, in_flight):
    prompt, params = _prompt(40), SamplingParams(4, 1.0, seed=1)
    batcher = Batcher(pieced.engine, pieced.params[0], 0, in_flight=in_flight, prefill_budget=CHUNK)
    batcher.admit([_request(9, _prompt(2), SamplingParams(46))])
    batcher.step()
    halfway = _request(0, prompt, params)
    batcher.admit([halfway])
    batcher.step()
    batcher.step()

    batcher.swap(pieced.params[1], 1)
    while not halfway.finished:
        batcher.step()
    (later,) = _finish(batcher, [_request(1, prompt, params)])

    version = 0 if in_flight == "finish" else 1
    completion = halfway.completion()
    tokens, logprobs = pieced.naive(prompt, params, version)
    np.testing.assert_array_equal(completion.tokens, tokens)
    np.testing.assert_array_equal(completion.versions, [version] * 4)
    np.testing.assert_allclose(completion.logprobs, logprobs, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(later.tokens, pieced.naive(prompt, params, 1)[0])


def test_two_rows_of_one_call_follow_beginnings_of_different_length(pieced):
    engine, weights = pieced.engine, pieced.params[0]
    state, prompts = engine.init_state(), [_prompt(12, seed=1), _prompt(20, seed=2)]
    first = [Piece(prompt[:8], slot) for slot, prompt in enumerate(prompts)]
    prefix = engine.prefill(weights, first, 0, state)
    params = SamplingParams(1)
    state = engine.insert(prefix, state, [Entry(i, i, params) for i in range(2)], resume=True)
    prefix = engine.prefill(weights, [Piece(prompts[1][8:16], 1, 8)], 0, state)
    state = engine.insert(prefix, state, [Entry(1, 0, params, 8)], resume=True)

    last = [Piece(prompts[0][8:], 0, 8), Piece(prompts[1][16:], 1, 16)]
    both = engine.prefill(weights, last, 0, state)

    for row, prompt in enumerate(prompts):
        token, _ = pieced.naive(prompt, SamplingParams(1, temperature=0.0))
        assert int(np.argmax(both.first.logits[row])) == token[0]
        alone = engine.prefill(weights, [last[row]], 0, state)
        np.testing.assert_array_equal(both.first.logits[row], alone.first.logits[0])


def test_prompt_without_pieces_is_deprecated_and_still_served(pieced):
    engine, weights, prompt = pieced.engine, pieced.params[0], _prompt(6)
    state = engine.init_state()

    with pytest.warns(FutureWarning, match="pass Pieces and the decode state"):
        old = engine.prefill(weights, [prompt], 0)

    new = engine.prefill(weights, [Piece(prompt)], 0, state)
    np.testing.assert_array_equal(old.first.logits, new.first.logits)
    engine.insert(old, state, [Entry(0, 0, SamplingParams(2))])

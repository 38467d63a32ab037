"""The engine's verbs against one full forward per token, without a driver."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.inference.engine import Engine, Entry, Piece
from jaxrl.models.model import build_model, stack_layers
from jaxrl.sharding import make_mesh
from jaxrl.types import SamplingParams
from jaxrl.weights.exchange import copy_to


def _decode(engine, params, entries, prompts, version=0, dispatches=20):
    """Prefill `prompts` one by one, fill the slots, decode to the end -> per slot rows [n, 4]."""
    state = engine.init_state()
    for entry, prompt in zip(entries, prompts, strict=True):
        prefix = engine.prefill(params, [Piece(prompt)], version, state)
        state = engine.insert(prefix, state, [entry])
    return _run(engine, params, state, version, dispatches)


def _run(engine, params, state, version=0, dispatches=20):
    results = []
    for _ in range(dispatches):
        state, result = engine.generate(
            params,
            state,
            version=version,
            mask=np.ones(engine.slots, bool),
            longest=engine.max_length,
        )
        results.append(np.asarray(result))
    rows = np.concatenate(results, 1)
    return {slot: rows[slot][rows[slot, :, 1] > 0] for slot in range(engine.slots)}


def _logp(rows):
    return np.ascontiguousarray(rows[:, 3]).view(np.float32)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_tokens_and_logprobs_equal_one_full_forward_per_token(tiny, prompts, temperature):
    for start in (0, 4):
        chosen = prompts[start : start + 4]
        params = [SamplingParams(10 + i, temperature, seed=i) for i in range(4)]

        rows = _decode(
            tiny.engine, tiny.params[0], [Entry(i, 0, params[i]) for i in range(4)], chosen
        )

        for slot, prompt in enumerate(chosen):
            tokens, logps = tiny.naive(prompt, params[slot])
            np.testing.assert_array_equal(rows[slot][:, 0], tokens)
            np.testing.assert_allclose(_logp(rows[slot]), logps, rtol=0, atol=1e-4)


def test_one_prefix_fans_out_to_many_slots_with_their_own_seeds(tiny, prompts):
    params = [SamplingParams(8, 1.0, seed=i) for i in range(4)]
    state, pieces = tiny.engine.init_state(), [Piece(prompts[0]), Piece(prompts[2])]
    prefix = tiny.engine.prefill(tiny.weights(0), pieces, 0, state)

    state = tiny.engine.insert(prefix, state, [Entry(i, 1, params[i]) for i in range(4)])
    rows = _run(tiny.engine, tiny.weights(0), state, dispatches=3)

    for slot in range(4):
        np.testing.assert_array_equal(rows[slot][:, 0], tiny.naive(prompts[2], params[slot])[0])
    assert len({tuple(rows[slot][:, 0]) for slot in range(4)}) == 4


def test_peek_tells_what_generate_gives_out_next(tiny, prompts):
    params, state = SamplingParams(6, 1.0, seed=2), tiny.engine.init_state()
    prefix = tiny.engine.prefill(tiny.weights(0), [Piece(prompts[1])], 3, state)
    state = tiny.engine.insert(prefix, state, [Entry(2, 0, params)])

    seen = np.asarray(tiny.engine.peek(state))
    rows = _run(tiny.engine, tiny.weights(0), state, dispatches=2)

    np.testing.assert_array_equal(seen[2], rows[2][0])
    assert not seen[[0, 1, 3]].any()  # empty slots
    assert len(rows[2]) == 6


def test_first_token_that_stops_ends_the_row_and_keeps_its_logprob(tiny, prompts):
    token, logp = tiny.naive(prompts[3], SamplingParams(1, 1.0, seed=11))
    params = SamplingParams(5, 1.0, seed=11, stop_tokens=(int(token[0]),))

    rows = _decode(tiny.engine, tiny.params[0], [Entry(2, 0, params)], [prompts[3]], dispatches=2)

    np.testing.assert_array_equal(rows[2][:, 0], token)
    np.testing.assert_allclose(_logp(rows[2]), logp, rtol=0, atol=1e-4)
    assert _logp(rows[2])[0] < -1e-3


def test_max_tokens_one_gives_one_token(tiny, prompts):
    params = SamplingParams(1, 0.6, seed=3)

    rows = _decode(tiny.engine, tiny.params[0], [Entry(0, 0, params)], [prompts[1]], dispatches=2)

    np.testing.assert_array_equal(rows[0][:, 0], tiny.naive(prompts[1], params)[0])


def test_frozen_rows_keep_their_cache_and_get_no_valid_token(tiny, prompts):
    engine, weights = tiny.engine, tiny.weights(0)
    state = engine.init_state()
    for slot, limit in enumerate((2, 20, 20)):
        prefix = engine.prefill(weights, [Piece(prompts[slot])], 0, state)
        state = engine.insert(prefix, state, [Entry(slot, 0, SamplingParams(limit, 1.0, slot))])
    mask = np.array([True, True, False, True])
    for _ in range(2):
        state, result = engine.generate(
            weights, state, version=0, mask=mask, longest=engine.max_length
        )
    before = jax.tree.map(np.array, state.cache)

    state, result = engine.generate(weights, state, version=0, mask=mask, longest=engine.max_length)

    after = jax.tree.map(np.array, state.cache)
    # Slot 0 is finished, 2 is masked, 3 is empty.
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[[0, 2, 3]], new[[0, 2, 3]])
        assert not np.array_equal(old[1], new[1])
    np.testing.assert_array_equal(np.asarray(result)[:, :, 1].sum(1), [0, 4, 0, 0])


def test_version_is_stamped_where_the_logits_were_computed(tiny, prompts):
    engine, weights = tiny.engine, tiny.weights(0)
    state = engine.init_state()
    prefix = engine.prefill(weights, [Piece(prompts[0])], 3, state)
    state = engine.insert(prefix, state, [Entry(0, 0, SamplingParams(9, 1.0))])

    versions = []
    for version in (5, 8, 9):
        state, result = engine.generate(
            weights, state, version=version, mask=np.ones(4, bool), longest=20
        )
        rows = np.asarray(result)[0]
        versions += rows[rows[:, 1] > 0, 2].tolist()

    # The last token of a dispatch is given out by the next one, with the version that drew it.
    assert versions == [3, 5, 5, 5, 5, 8, 8, 8, 8]


def test_dispatch_ends_early_when_a_slot_is_free_or_its_steps_are_done(tiny, prompts):
    engine, weights = tiny.engine, tiny.weights(0)
    state = engine.init_state()
    prefix = engine.prefill(weights, [Piece(prompts[0])], 0, state)
    entries = [Entry(slot, 0, SamplingParams(limit, 1.0)) for slot, limit in ((0, 2), (1, 20))]
    state = engine.insert(prefix, state, entries)
    mask = np.ones(4, bool)

    state, result = engine.generate(weights, state, version=0, mask=mask, longest=20, leave_at=1)
    np.testing.assert_array_equal(np.asarray(result)[:2, :, 1], [[1, 1, 0, 0], [1, 1, 0, 0]])

    state, result = engine.generate(weights, state, version=0, mask=mask, longest=20, max_steps=3)
    np.testing.assert_array_equal(np.asarray(result)[:2, :, 1], [[0] * 4, [1, 1, 1, 0]])


def test_nothing_compiles_after_warm_up(tiny, prompts):
    engine = tiny.engine
    before = engine.compile_count
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
    )

    for prompt in prompts:
        _decode(
            engine, tiny.params[1], [Entry(1, 0, SamplingParams(6, 0.5))], [prompt], dispatches=2
        )
    state = engine.init_state()
    prefix = engine.prefill(tiny.weights(2), [Piece(p) for p in prompts[:2]], 1, state)
    state = engine.insert(prefix, state, [Entry(0, 1, SamplingParams(3))], resume=True)

    assert engine.compile_count == before
    assert compiled == []


def test_warm_up_for_some_prompts_leaves_the_others_for_later(tiny, prompts):
    engine = Engine(tiny.model, slots=2, max_length=48, prefill_buckets=(8,), attend_buckets=(48,))

    engine.warm_up(prefill_buckets=[8])
    before, state = engine.compile_count, engine.init_state()
    engine.prefill(tiny.params[0], [Piece(prompts[1])], 0, state)
    short = engine.compile_count
    engine.prefill(tiny.params[0], [Piece(prompts[4])], 0, state)

    # init, start, peek, generate, and prefill and copy of one bucket.
    assert (before, short, engine.compile_count) == (6, 6, 7)


def test_weights_that_do_not_fit_are_refused_by_name(tiny):
    wrong_dtype = {**tiny.params[0], "embedding": tiny.params[0]["embedding"].astype("bfloat16")}
    with pytest.raises(ValueError, match=r"weight embedding is bfloat16\[40, 32\]"):
        tiny.engine.check_params(wrong_dtype)
    with pytest.raises(ValueError, match="weights have the tree"):
        tiny.engine.check_params({"embedding": tiny.params[0]["embedding"]})
    elsewhere = jax.device_put(tiny.params[0], jax.devices()[1])
    with pytest.raises(ValueError, match="copy the weights to engine"):
        tiny.engine.check_params(elsewhere)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"slots": 0}, "slots=0 must be at least 1"),
        ({"max_length": 1}, "max_length=1"),
        ({"prefill_buckets": (64,)}, "prefill_buckets: 64 must lie between 1 and max_length=48"),
        ({"steps_per_dispatch": 0}, "steps_per_dispatch=0"),
    ],
)
def test_impossible_sizes_are_refused(tiny, sizes, message):
    with pytest.raises(ValueError, match=message):
        Engine(tiny.model, **{"slots": 4, "max_length": 48, **sizes})


def test_attention_over_a_part_of_the_cache_changes_nothing(tiny, prompts):
    engine, weights = tiny.engine, tiny.weights(0)
    state = engine.init_state()
    prefix = engine.prefill(weights, [Piece(prompts[5])], 0, state)
    # The other rows stand beyond the part that is attended to; they are masked.
    long = engine.prefill(weights, [Piece(np.arange(30))], 0, state)
    results = []
    for longest in (20, 48):
        state = engine.insert(prefix, engine.init_state(), [Entry(1, 0, SamplingParams(9, 1.0))])
        state = engine.insert(long, state, [Entry(2, 0, SamplingParams(9, 1.0))])
        mask = np.array([False, True, False, False])
        state, result = engine.generate(weights, state, version=0, mask=mask, longest=longest)
        state, after = engine.generate(weights, state, version=0, mask=np.ones(4, bool), longest=48)
        results.append((np.asarray(result), np.asarray(after)))

    for short, whole in zip(*results, strict=True):
        np.testing.assert_array_equal(short[:, :, :3], whole[:, :, :3])
        logps = [np.ascontiguousarray(x[:, :, 3]).view(np.float32) for x in (short, whole)]
        np.testing.assert_allclose(*logps, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "scan_layers"),
    [
        ({"data": 4, "tensor": 2}, False),
        pytest.param({"data": 4, "tensor": 2}, True, marks=pytest.mark.slow),
        pytest.param({"context": 2, "expert": 2, "tensor": 2}, False, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "expert_tensor": 2, "tensor": 2}, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_results_on_a_mesh_equal_those_of_one_device(tiny, prompts, tiny_config, axes, scan_layers):
    model = tiny.model
    weights = tiny.params[0]
    if scan_layers:
        model = build_model(dataclasses.replace(tiny_config, scan_layers=True))
        weights = stack_layers(weights)
    mesh = make_mesh(**axes)
    engine = Engine(
        model,
        slots=4,
        max_length=48,
        prefill_buckets=(48,),
        steps_per_dispatch=4,
        prefill_rows=1,
        max_stop_tokens=2,
        mesh=mesh,
    )
    sharded = copy_to(weights, engine.param_shardings)
    params = [SamplingParams(6, 1.0, seed=i) for i in range(4)]
    entries = [Entry(i, 0, params[i]) for i in range(4)]

    rows = _decode(engine, sharded, entries, prompts[:4], dispatches=2)

    count = engine.compile_count
    for slot in range(4):
        tokens, logps = tiny.naive(prompts[slot], params[slot])
        np.testing.assert_array_equal(rows[slot][:, 0], tokens)
        np.testing.assert_allclose(_logp(rows[slot]), logps, rtol=0, atol=1e-4)
    _decode(engine, sharded, entries, prompts[:4], dispatches=2)
    assert engine.compile_count == count
    keys = jax.tree.leaves(engine.init_state().cache)[0]
    assert keys.addressable_shards[0].data.size * 8 == keys.size


def test_slots_that_the_mesh_cannot_split_are_refused(tiny):
    with pytest.raises(ValueError, match="slots=3 must be divisible by the mesh's batch axes, 4"):
        Engine(tiny.model, slots=3, max_length=48, mesh=make_mesh(data=4, tensor=2))

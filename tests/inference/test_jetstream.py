"""Our engine behind JetStream's verbs, called as a driver would call them; without the package.

The interface is that of the last development version (`later_jetstream`), which no release has.
The published one is tested in `test_jetstream_driver`, by JetStream's own driver.
"""

from __future__ import annotations

import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference import later_jetstream
from inference.jetstream_cases import (
    CHUNK,
    LENGTH,
    OPTIONS,
    SLOTS,
    TEMPERATURE,
    decode,
    naive,
    padded,
    prefill,
    seed_of,
)

from jaxrl.errors import WeightVersionError
from jaxrl.inference.jetstream import make_engine
from jaxrl.inference.jetstream_results import read_records
from jaxrl.inference.jetstream_text import NO_BOS


@pytest.fixture(scope="module")
def warm(tiny, tokenizer):
    """One engine for all tests, and its weights."""
    engine = make_engine(
        tiny.model,
        tiny.params[0],
        tiny.versions[0],
        tokenizer,
        temperature=TEMPERATURE,
        seed=9,
        **OPTIONS,
    )
    return engine, engine.load_params()


@pytest.fixture
def engine(tiny, warm):
    """The engine with its first weights."""
    engine, weights = warm
    weights.current = (tiny.params[0], tiny.versions[0])
    return engine


@pytest.fixture
def weights(warm):
    return warm[1]


def test_the_class_has_every_method_of_the_interface_and_takes_its_arguments(engine):
    api = later_jetstream.Engine

    assert isinstance(engine, api)
    assert not type(engine).__abstractmethods__
    for name in sorted({*api.__abstractmethods__, "free_resource"}):
        wanted = getattr(api, name)
        if isinstance(wanted, property):
            assert isinstance(getattr(type(engine), name), property), name
            continue
        have = inspect.signature(getattr(type(engine), name)).parameters
        for parameter in inspect.signature(wanted).parameters.values():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                assert have[parameter.name].kind == parameter.kind, (name, parameter.name)


def test_nothing_of_jetstream_is_imported(engine):
    assert not [name for name in sys.modules if name.split(".")[0] == "jetstream"]


def test_sizes_are_those_asked_for(engine):
    assert engine.max_concurrent_decodes == SLOTS
    assert engine.samples_per_slot == 1
    assert engine.max_prefill_length == 32  # the largest power of two below 48
    assert engine.prefill_chunk_size == CHUNK
    assert engine.use_chunked_prefill is False
    assert engine.mesh.devices.size == 1


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33])
def test_prefill_tells_the_first_token_and_generate_those_after_it(tiny, engine, weights, length):
    prompt = np.random.default_rng(length).integers(0, 40, length)

    prefix, first = prefill(engine, weights, prompt)
    state = engine.insert(prefix, engine.init_decode_state(), slot=2, request_id="some")
    _, later = decode(engine, weights, state, 5)

    told = [(read_records(first), 0), *((records, 2) for records in later)]
    tokens, logps = naive(tiny, prompt, seed_of(prefix), 6)
    assert [int(r.tokens[row]) for r, row in told] == tokens.tolist()
    assert [int(r.lengths[row]) for r, row in told] == [1, 2, 3, 4, 5, 6]
    assert {int(r.versions[row]) for r, row in told} == {0}
    ours = [float(r.logprobs[row]) for r, row in told]
    np.testing.assert_allclose(ours, logps, rtol=0, atol=1e-4)


def test_log_prob_of_the_interface_is_ours_and_rows_never_filled_are_not_valid(engine, weights):
    prefix, first = prefill(engine, weights, [3, 4, 5])
    state = engine.insert(prefix, engine.init_decode_state(), 1)

    _, result = engine.generate(weights, state)

    host = result.convert_to_numpy()
    slot = host.get_result_at_slots((1,))
    records = read_records(result)
    assert slot.tokens.tolist() == [[records.tokens[1]]]
    assert slot.log_prob.tolist() == [[records.logprobs[1]]]
    assert host.data[:, 1].tolist() == [0, 1, 0, 0]
    assert first.log_prob.shape == (1, 1)
    assert first.log_prob[0, 0] == read_records(first).logprobs[0]


def test_a_sequence_ends_with_eos_where_the_cache_ends_and_goes_on_saying_so(tiny, engine, weights):
    prompt = np.arange(LENGTH - 4) % 40

    prefix, _ = prefill(engine, weights, prompt)
    state = engine.insert(prefix, engine.init_decode_state(), 0)
    _, later = decode(engine, weights, state, 6)

    tokens = naive(tiny, prompt, seed_of(prefix), 4)[0].tolist()
    assert [int(r.tokens[0]) for r in later] == [*tokens[1:], 200, 200, 200]
    assert [int(r.versions[0]) for r in later] == [0, 0, 0, -1, -1, -1]
    assert [int(r.lengths[0]) for r in later] == [2, 3, 4, 5, 6, 7]


def test_insert_leaves_nothing_of_what_was_in_the_slot_and_harms_no_neighbour(
    tiny, engine, weights, prompts
):
    long, short, other = prompts[7], prompts[0], prompts[2]
    state = engine.init_decode_state()
    one, _ = prefill(engine, weights, long)
    two, _ = prefill(engine, weights, other)
    state = engine.insert(one, engine.insert(two, state, 1), 0)
    state, before = decode(engine, weights, state, 9)

    three, first = prefill(engine, weights, short)
    state, after = decode(engine, weights, engine.insert(three, state, 0), 6)

    expected = naive(tiny, short, seed_of(three), 7)[0].tolist()
    told = [int(read_records(first).tokens[0]), *(int(r.tokens[0]) for r in after)]
    assert told == expected
    neighbour = [int(r.tokens[1]) for r in [*before, *after]]
    assert neighbour == naive(tiny, other, seed_of(two), 16)[0].tolist()[1:]


def test_a_prefix_may_be_deleted_after_insert_and_results_outlive_later_steps(
    tiny, engine, weights, prompts
):
    prefix, _ = prefill(engine, weights, prompts[5])
    seed = seed_of(prefix)
    state = engine.insert(prefix, engine.init_decode_state(), 0)
    for leaf in jax.tree.leaves(prefix):
        if isinstance(leaf, jax.Array):
            leaf.delete()
    results = []
    for _ in range(9):
        state, result = engine.generate(weights, state)
        results.append(result)

    tokens = [int(read_records(result).tokens[0]) for result in results]

    assert tokens == naive(tiny, prompts[5], seed, 10)[0].tolist()[1:]


def test_samples_of_one_prompt_have_seeds_of_their_own_and_go_into_their_slots(
    tiny, engine, weights, prompts
):
    prefix, first = engine.prefill_multisampling(
        params=weights, padded_tokens=padded(prompts[6]), true_length=17, num_samples=3
    )

    state = engine.bulk_insert(prefix, engine.init_decode_state(), slots=[3, 0, 2])
    _, later = decode(engine, weights, state, 5)

    told = read_records(first)
    assert first.samples_per_slot == 3
    assert told.tokens.shape == (3,)
    texts = []
    for sample, slot in enumerate([3, 0, 2]):
        texts.append([int(told.tokens[sample]), *(int(r.tokens[slot]) for r in later)])
        assert texts[-1] == naive(tiny, prompts[6], seed_of(prefix, sample), 6)[0].tolist()
        assert {int(r.streams[slot]) for r in later} == {int(told.streams[sample])}
    assert len(set(map(tuple, texts))) == 3


def test_a_key_of_jax_random_decides_what_is_sampled(engine, weights, prompts):
    def sample(key):
        result = engine.prefill_multisampling(
            params=weights,
            padded_tokens=padded(prompts[2]),
            true_length=8,
            rng=key,
            num_samples=4,
        )[1]
        return read_records(result).tokens.tolist()

    one, two = sample(jax.random.key(1)), sample(jax.random.PRNGKey(2))

    assert sample(jax.random.key(1)) == one
    assert sample(jax.random.key(2)) == two
    assert one != two


def test_one_sample_in_many_slots_goes_on_in_each_on_its_own(engine, weights, prompts):
    prefix, _ = prefill(engine, weights, prompts[1])

    state = engine.bulk_insert(prefix, engine.init_decode_state(), [0, 1, 2, 3])
    _, later = decode(engine, weights, state, 8)

    assert len({tuple(int(r.tokens[slot]) for r in later) for slot in range(4)}) == 4


@pytest.mark.parametrize("cuts", [(16, 32), (16,), (5, 21, 30), (32,)])
def test_a_prompt_in_chunks_gives_the_bits_of_the_whole_prompt(engine, weights, cuts):
    prompt = np.random.default_rng(3).integers(0, 40, 39)

    def sample(start, existing=None):
        prefix, result = engine.prefill_multisampling(
            params=weights,
            existing_prefix=existing,
            padded_tokens=padded(prompt[start:]),
            true_length=39 - start,
            rng=jax.random.key(5),
            num_samples=4,
        )
        return prefix, read_records(result)

    existing = None
    for start, end in zip((0, *cuts), cuts, strict=False):
        prefix, _ = prefill(engine, weights, prompt[start:end], existing_prefix=existing)
        existing = later_jetstream.ExistingPrefix(prefix["cache"], jnp.asarray(prompt[:end]))
    (pieces, told), (whole, expected) = sample(cuts[-1], existing), sample(0)

    assert pieces.tokens.tolist() == prompt.tolist()
    np.testing.assert_array_equal(told.tokens, expected.tokens)
    np.testing.assert_array_equal(told.logprobs, expected.logprobs)
    for one, other in zip(*(jax.tree.leaves(x.cache.kv) for x in (pieces, whole)), strict=True):
        np.testing.assert_array_equal(one[..., :39, :], other[..., :39, :])


def test_whole_pieces_of_an_existing_prefix_are_used_not_computed_again(engine, weights):
    prompt, other = np.arange(20) % 40, np.arange(20, 40) % 40

    def kv_after(computed):
        prefix, _ = prefill(engine, weights, computed[:16])
        existing = later_jetstream.ExistingPrefix(prefix["cache"], jnp.asarray(prompt[:16]))
        done, _ = prefill(engine, weights, prompt[16:], existing_prefix=existing)
        return jax.tree.leaves(done.cache.kv)

    # A cache of other tokens than it says shows up in what is made of it.
    honest, wrong = kv_after(prompt), kv_after(other)

    assert not np.array_equal(honest[0][..., :16, :], wrong[0][..., :16, :])
    assert not np.array_equal(honest[-1][..., 16:20, :], wrong[-1][..., 16:20, :])


def test_the_cache_of_older_weights_is_not_used(tiny, engine, weights):
    prompt = np.arange(32) % 40
    prefix, _ = prefill(engine, weights, prompt[:16])
    existing = later_jetstream.ExistingPrefix(prefix["cache"], jnp.asarray(prompt[:16]))

    engine.set_weights(tiny.params[1], tiny.versions[1])
    later, result = prefill(engine, weights, prompt[16:], existing_prefix=existing)

    token, logp = naive(tiny, prompt, seed_of(later), 1, version=1)
    told = read_records(result)
    assert (told.tokens.tolist(), told.versions.tolist()) == (token.tolist(), [1])
    np.testing.assert_allclose(told.logprobs, logp, rtol=0, atol=1e-4)


def test_new_weights_reach_who_has_loaded_the_old_ones_and_tokens_say_which(
    tiny, engine, weights, prompts
):
    prefix, first = prefill(engine, weights, prompts[4])
    state = engine.insert(prefix, engine.init_decode_state(), 0)
    state, before = decode(engine, weights, state, 2)

    engine.set_weights(tiny.params[2], tiny.versions[2])
    _, after = decode(engine, weights, state, 3)

    records = [read_records(first), *before, *after]
    tokens = [int(r.tokens[0]) for r in records]
    versions = [int(r.versions[0]) for r in records]
    assert versions == [0, 0, 0, 2, 2, 2]
    expected = tiny.mixed_cache_logprobs(prompts[4], tokens, versions, TEMPERATURE)
    ours = [float(r.logprobs[0]) for r in records]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


def test_weights_of_a_wrong_digest_or_a_lower_number_are_refused(tiny, engine):
    engine.set_weights(tiny.params[1], tiny.versions[1])

    with pytest.raises(WeightVersionError, match="digest"):
        engine.set_weights(tiny.params[0], tiny.versions[2])
    with pytest.raises(WeightVersionError, match="older"):
        engine.set_weights(tiny.params[0], tiny.versions[0])

    assert engine.weights.version == tiny.versions[1]


def test_a_freed_slot_is_decoded_no_further_until_it_is_filled_again(
    tiny, engine, weights, prompts
):
    prefix, _ = prefill(engine, weights, prompts[3])
    state = engine.bulk_insert(prefix, engine.init_decode_state(), [0, 1])
    engine.free_resource(0)

    frozen, records = decode(engine, weights, state, 2)
    again = engine.insert(prefix, frozen, 0)
    _, later = decode(engine, weights, again, 2)

    assert int(records[0].tokens[0]) == int(records[1].tokens[0])  # the one drawn before, again
    assert frozen.held.tolist() == [9, 11, 0, 0]
    tokens = naive(tiny, prompts[3], seed_of(prefix), 3)[0].tolist()
    assert [int(r.tokens[0]) for r in later] == tokens[1:]


def test_a_slot_that_was_filled_before_it_was_freed_goes_on(tiny, engine, weights, prompts):
    prefix, _ = prefill(engine, weights, prompts[3])
    state = engine.insert(prefix, engine.init_decode_state(), 0)
    state = engine.insert(prefix, state, 0)

    engine.free_resource(0)  # of the request before
    _, later = decode(engine, weights, state, 4)

    tokens = naive(tiny, prompts[3], seed_of(prefix), 5)[0].tolist()
    assert [int(r.tokens[0]) for r in later] == tokens[1:]


@pytest.mark.parametrize(
    ("tokens", "length", "same_as"),
    [
        (np.arange(5, 13, dtype=np.int64), 99, np.arange(5, 13)),  # the unclipped length
        (np.arange(5, 13, dtype=np.float32), 3, np.arange(5, 8)),
        (np.array([NO_BOS, 7, 8, 0]), 3, np.array([7, 8])),
        (np.array([7, 1000, -5]), 3, np.array([7, 39, 0])),
        (np.zeros(0, np.float32), 0, np.array([0])),
        (np.array([NO_BOS]), 1, np.array([0])),
        (np.arange(64) % 40, 64, (np.arange(64) % 40)[-47:]),
    ],
)
def test_odd_prompts_are_served_and_raise_nothing(engine, weights, tokens, length, same_as):
    prefix, result = engine.prefill(params=weights, padded_tokens=tokens, true_length=length)

    assert np.asarray(prefix.tokens).tolist() == same_as.tolist()
    assert np.isfinite(read_records(result).logprobs).all()


def test_a_prefix_moves_as_the_engine_says_and_nothing_compiles(tiny, engine, weights, prompts):
    before = engine.compile_count
    prefix, _ = prefill(engine, weights, prompts[7])

    moved = jax.device_put(prefix, engine.get_prefix_destination_sharding())
    _, later = decode(engine, weights, engine.insert(moved, engine.init_decode_state(), 0), 3)

    places = engine.get_prefix_destination_sharding()
    assert jax.tree.structure(places) == jax.tree.structure(prefix)
    tokens = naive(tiny, prompts[7], seed_of(prefix), 4)[0].tolist()
    assert [int(r.tokens[0]) for r in later] == tokens[1:]
    assert engine.compile_count == before


def test_another_sampler_and_bare_weights_are_refused(tiny, engine, weights):
    with pytest.raises(ValueError, match=r"sampler=.* must be None: sampling is the engine's own"):
        prefill(engine, weights, [1, 2], sampler=lambda logits: logits)
    with pytest.raises(TypeError, match="load_params"):
        prefill(engine, tiny.params[0], [1, 2])

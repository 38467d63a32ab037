"""Making an engine behind JetStream's verbs: what is refused, other ends of a text, meshes."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from inference.jetstream_cases import (
    LENGTH,
    OPTIONS,
    SLOTS,
    TEMPERATURE,
    decode,
    naive,
    prefill,
    seed_of,
)

from jaxrl.errors import ConfigError, WeightVersionError
from jaxrl.inference.engine import Engine
from jaxrl.inference.jetstream import make_engine
from jaxrl.inference.jetstream_results import read_records
from jaxrl.sharding import make_mesh
from jaxrl.types import SamplingParams
from jaxrl.weights.exchange import copy_to


def test_eos_as_the_first_token_is_told_again_by_the_next_step(tiny, tokenizer, prompts):
    first = int(tiny.naive(prompts[3], SamplingParams(1, 0.0))[0][0])
    ends = dataclasses.replace(tokenizer, eos_id=first, stop_ids=())
    engine = make_engine(tiny.model, tiny.params[0], tiny.versions[0], ends, **OPTIONS)
    weights = engine.weights

    prefix, result = prefill(engine, weights, prompts[3])
    state = engine.insert(prefix, engine.init_decode_state(), 3)
    _, later = decode(engine, weights, state, 2)

    assert read_records(result).tokens.tolist() == [first]
    assert [int(r.tokens[3]) for r in later] == [first, first]
    assert [int(r.versions[3]) for r in later] == [-1, -1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_prefill_length": 24}, "max_prefill_length=24 must be a power of two"),
        ({"max_prefill_length": 64}, "power of two from 16 to 32"),
        ({"max_length": 16}, "max_length=16 must be above 16"),
        ({"role": "decode"}, "role='decode' must be one of both, prefill, generate"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
    ],
)
def test_options_that_cannot_be_are_refused(tiny, tokenizer, options, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(
            tiny.model,
            tiny.params[0],
            tiny.versions[0],
            tokenizer,
            **{**OPTIONS, **options},
        )


def test_weights_that_are_not_those_of_the_version_are_refused(tiny, tokenizer):
    with pytest.raises(WeightVersionError, match="digest"):
        make_engine(tiny.model, tiny.params[0], tiny.versions[1], tokenizer, **OPTIONS)


@pytest.mark.slow
def test_on_a_mesh_the_tokens_are_those_of_one_device(tiny, tokenizer, prompts):
    mesh = make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    options = {**OPTIONS, "temperature": TEMPERATURE, "mesh": mesh}
    places = Engine(tiny.model, slots=SLOTS, max_length=LENGTH, mesh=mesh).param_shardings
    engine = make_engine(
        tiny.model, copy_to(tiny.params[0], places), tiny.versions[0], tokenizer, **options
    )
    weights = engine.load_params()
    compiled = engine.compile_count

    prefix, _ = prefill(engine, weights, prompts[7])
    moved = jax.device_put(prefix, engine.get_prefix_destination_sharding())
    state = engine.bulk_insert(moved, engine.init_decode_state(), [1])
    state = engine.insert(prefix, state, 2)
    _, later = decode(engine, weights, state, 4)

    tokens = naive(tiny, prompts[7], seed_of(prefix), 5)[0].tolist()
    assert [int(r.tokens[1]) for r in later] == tokens[1:]
    assert [int(r.tokens[2]) for r in later] == tokens[1:]
    assert engine.compile_count == compiled

"""Decode calls: what clients of either version of the protocol ask, and what they get."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving.grpc_setup import (
    HEAD_FIELDS,
    OLD_FIELDS,
    PROMPT,
    Stub,
    decode,
    gathered,
    ids,
    scripted,
    serving,
)

from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.errors import DataError, RequestError
from jaxrl.serving import protocol
from jaxrl.serving.backend import Backend
from jaxrl.serving.grpc_decode import generates_of, prompt_of
from jaxrl.serving.openai_requests import derived_seed
from jaxrl.types import SamplingParams, WeightVersion

BYTES = load_tokenizer("bytes")


def text_of(responses, index=0) -> str:
    return "".join(gathered(responses, index, "text"))


@pytest.fixture(scope="module")
def driver(tiny):
    with tiny.driver() as driver:
        yield driver


@pytest.mark.asyncio
@pytest.mark.parametrize("content", [ids(*PROMPT), "text"], ids=["tokens", "text"])
@pytest.mark.parametrize("fields", [OLD_FIELDS, HEAD_FIELDS], ids=["0.2.2", "development"])
async def test_published_client_gets_tokens_and_their_text(driver, fields, content):
    stub = Stub(fields)
    prompt = {"text_content": {"text": "héllo"}}
    if content != "text":
        prompt = {"token_content": content}

    async with serving(driver, stop_ids=()) as (_, channel):
        request = stub.Request(max_tokens=10, **prompt)
        responses = [response async for response in stub.decode(channel, request)]

    tokens = gathered(responses)
    assert len(tokens) == 10
    assert text_of(responses) == driver.tokenizer.decode(tokens)
    # Published clients take the first sample of every response without a look.
    assert all(len(response.stream_content.samples) == 1 for response in responses)
    assert len(responses) > 2


@pytest.mark.asyncio
async def test_extended_client_gets_what_the_driver_samples_bit_for_bit(driver):
    params = SamplingParams(9, 0.7, seed=11, top_k=20, top_p=0.9, top_logprobs=2)
    expected = driver.sample_blocking(np.array(PROMPT), params)

    async with serving(driver, stop_ids=()) as (_, channel):
        call = decode(
            channel,
            token_content=ids(*PROMPT),
            max_tokens=9,
            temperature=0.7,
            seed=11,
            top_k=20,
            top_p=0.9,
            logprobs=True,
            top_logprobs=2,
        )
        responses = [response async for response in call]

    assert gathered(responses) == expected.tokens.tolist()
    assert gathered(responses, field="logprobs") == expected.logprobs.tolist()
    assert gathered(responses, field="weight_versions") == expected.versions.tolist()
    alternatives = gathered(responses, field="top_logprobs")
    assert [list(a.token_ids) for a in alternatives] == expected.top_tokens.tolist()
    assert [list(a.logprobs) for a in alternatives] == expected.top_logprobs.tolist()
    assert text_of(responses) == expected.text
    weights = [weight for response in responses for weight in response.weights]
    assert [(w.number, w.digest) for w in weights] == [(0, driver.version.digest)]
    *earlier, last = responses
    assert last.stream_content.samples[0].finish_reason == "length"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 9)
    assert not any(response.HasField("usage") for response in earlier)


@pytest.mark.asyncio
async def test_logprobs_come_only_if_asked_for(driver):
    async with serving(driver, stop_ids=()) as (_, channel):
        call = decode(channel, token_content=ids(*PROMPT), max_tokens=5)
        responses = [response async for response in call]

    assert gathered(responses, field="logprobs") == []
    assert gathered(responses, field="weight_versions") == [0] * 5


@pytest.mark.asyncio
async def test_several_samples_have_their_own_seeds_and_places(driver):
    seeds = [30, *(derived_seed(30, i) for i in range(1, 6))]
    expected = [
        driver.sample_blocking(np.array(PROMPT), SamplingParams(12, seed=seed)).tokens.tolist()
        for seed in seeds
    ]

    async with serving(driver, stop_ids=()) as (_, channel):
        call = decode(channel, token_content=ids(*PROMPT), max_tokens=12, num_samples=6, seed=30)
        responses = [response async for response in call]

    assert all(len(response.stream_content.samples) == 6 for response in responses)
    assert [gathered(responses, i) for i in range(6)] == expected
    assert len({tuple(tokens) for tokens in expected}) == 6
    assert responses[-1].usage.completion_tokens == 72
    reasons = [[s.finish_reason for s in r.stream_content.samples] for r in responses]
    assert [max(column) for column in zip(*reasons, strict=True)] == ["length"] * 6


@pytest.mark.asyncio
async def test_requests_without_a_seed_differ(driver):
    async with serving(driver, stop_ids=()) as (_, channel):
        calls = [decode(channel, token_content=ids(*PROMPT), max_tokens=12) for _ in range(2)]
        first, second = [gathered([r async for r in call]) for call in calls]

    assert first != second


@pytest.mark.asyncio
async def test_stop_token_of_the_request_and_of_the_tokenizer_end_it(driver):
    free = driver.sample_blocking(np.array(PROMPT), SamplingParams(20, seed=5)).tokens.tolist()

    fresh = [place for place, token in enumerate(free) if token not in free[:place]]
    early, late = fresh[1], fresh[-1]

    async with serving(driver, stop_ids=(free[late],)) as (_, channel):
        both = []
        for stops in ([], [free[early]]):
            call = decode(
                channel,
                token_content=ids(*PROMPT),
                max_tokens=20,
                seed=5,
                stop_token_ids=stops,
            )
            both.append([response async for response in call])

    for responses, wanted in zip(both, (free[: late + 1], free[: early + 1]), strict=True):
        assert gathered(responses) == wanted
        assert responses[-1].stream_content.samples[0].finish_reason == "stop"
        assert text_of(responses) == driver.tokenizer.decode(wanted[:-1])


@pytest.mark.asyncio
async def test_text_comes_in_whole_characters():
    driver = scripted(b"a\xe2", b"\x82", b"\xac\xc3", b"\xa9")

    async with serving(driver) as (_, channel):
        call = decode(channel, token_content=ids(*PROMPT), max_tokens=9)
        responses = [response async for response in call]

    assert gathered(responses, field="text") == ["a", "€", "é"]
    assert [len(r.stream_content.samples[0].token_ids) for r in responses] == [2, 1, 2, 1, 0]


@pytest.mark.asyncio
async def test_stop_text_over_several_tokens_is_cut_out():
    driver = scripted(b"one E", b"N", b"D two")

    async with serving(driver) as (_, channel):
        call = decode(channel, token_content=ids(*PROMPT), max_tokens=99, stop=["END"])
        responses = [response async for response in call]

    assert text_of(responses) == "one "
    assert responses[-1].stream_content.samples[0].finish_reason == "stop"
    assert responses[-1].usage.completion_tokens == 7
    assert driver.futures[0].done()


@pytest.mark.asyncio
async def test_each_version_is_told_with_its_first_token():
    driver = scripted(b"ab", b"cd", b"ef", versions=[0, 0, 1])

    async with serving(driver) as (backend, channel):
        backend._remember(WeightVersion(1, "one"))
        call = decode(channel, token_content=ids(*PROMPT), max_tokens=9)
        responses = [response async for response in call]

    told = [[(w.number, w.digest) for w in response.weights] for response in responses]
    assert told == [[(0, "zero")], [], [(1, "one")], []]


@pytest.fixture
def wants_bos(tmp_path):
    """A tokenizer whose texts begin with <s>, id 1."""
    import tokenizers

    BYTES.save(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.prompt_prefix == (1,)
    return tokenizer


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"token_content": ids(50, 60)}, [1, 50, 60]),
        ({"token_content": ids(1, 50, 60)}, [1, 50, 60]),
        ({"token_content": ids(50, 1)}, [1, 50, 1]),
        ({"token_content": ids(50, 60), "has_bos": True}, [50, 60]),
        ({"text_content": {"text": "a"}}, [1, 3 + ord("a")]),
        ({"text_content": {"text": "a"}, "has_bos": True}, [3 + ord("a")]),
    ],
    ids=["tokens", "has it", "has it elsewhere", "has_bos", "text", "text with has_bos"],
)
def test_beginning_of_sequence_is_put_before_the_prompt_once(wants_bos, fields, expected):
    prompt = prompt_of(protocol.DecodeRequest(**fields), wants_bos)

    assert prompt.tolist() == expected
    assert prompt.dtype == np.int32


def test_tokenizer_that_wants_no_beginning_gets_the_prompt_as_it_is():
    prompt = prompt_of(protocol.DecodeRequest(token_content=ids(50, 60)), BYTES)

    assert prompt.tolist() == [50, 60]


WHOLE = protocol.DecodeRequest(
    token_content=ids(*PROMPT),
    max_tokens=6,
    temperature=0.5,
    top_k=4,
    top_p=0.9,
    seed=3,
    stop=["ab"],
    stop_token_ids=[4],
    num_samples=2,
    top_logprobs=2,
    timeout_seconds=4.0,
).SerializeToString()


@given(
    changes=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4),
    length=st.integers(0, len(WHOLE)),
)
def test_damaged_request_is_read_or_refused_as_the_clients_mistake(changes, length):
    data = bytearray(WHOLE)
    for place, byte in changes:
        data[place] = byte
    backend = Backend("tiny")
    backend.open(scripted())

    try:
        generates = generates_of(protocol.parse_request(bytes(data[:length])), backend)
    except (RequestError, DataError):
        return

    assert all(len(generate.tokens) for generate in generates)

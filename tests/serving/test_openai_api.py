"""OpenAI's own client against a real server with a real model."""

from __future__ import annotations

import numpy as np
import pytest
from serving.servers import NAME

from jaxrl.types import SamplingParams

openai = pytest.importorskip("openai", reason="needs the openai client")


@pytest.fixture(scope="module")
def client(shared):
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(shared, tiny, text, **options):
    """What the driver itself makes of a prompt."""
    ids = [*tiny.tokenizer.prompt_prefix, *tiny.tokenizer.encode(text)]
    params = SamplingParams(stop_tokens=tiny.chat.stop_ids, **options)
    return shared.backend.driver.sample_blocking(np.array(ids, np.int32), params)


def version_of(tiny, number):
    version = tiny.versions[number]
    return {"number": version.number, "digest": version.digest}


def test_models_are_listed(client, tiny):
    models = client.models.list().data

    assert [model.id for model in models] == [NAME]
    assert client.models.retrieve(NAME).weight_version == version_of(tiny, 0)


def test_completion_is_what_the_driver_samples(client, shared, tiny):
    answer = client.completions.create(
        model=NAME, prompt="Hi", max_tokens=9, temperature=0.7, top_p=0.9, seed=5
    )

    wanted = expected(shared, tiny, "Hi", max_tokens=9, temperature=0.7, top_p=0.9, seed=5)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == (wanted.text, "length", 0)
    assert answer.object == "text_completion"
    assert answer.system_fingerprint == str(tiny.versions[0])
    assert answer.weight_version["last"] == version_of(tiny, 0)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 9, 11)


def test_stream_is_the_same_completion_in_pieces(client, shared, tiny):
    chunks = list(
        client.completions.create(
            model=NAME,
            prompt="Hi",
            max_tokens=20,
            seed=6,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    wanted = expected(shared, tiny, "Hi", max_tokens=20, seed=6)
    *texts, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == wanted.text
    assert len(texts) > 3
    assert [chunk.choices[0].finish_reason for chunk in texts][-1] == "length"
    assert usage.choices == []
    assert usage.usage.completion_tokens == 20
    assert {chunk.system_fingerprint for chunk in chunks} == {str(tiny.versions[0])}


def test_chat_is_asked_through_the_template(client, shared, tiny):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

    answer = client.chat.completions.create(
        model=NAME, messages=messages, max_completion_tokens=6, temperature=0
    )

    prompt = tiny.chat.encode(messages)
    params = SamplingParams(6, 0.0, stop_tokens=tiny.chat.stop_ids)
    wanted = shared.backend.driver.sample_blocking(prompt, params)
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.object == "chat.completion"


def test_chat_stream_begins_with_the_role(client):
    chunks = list(
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=8,
            stream=True,
            seed=1,
        )
    )

    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_completion_logprobs_are_those_of_the_tokens_with_versions(client, shared, tiny):
    answer = client.completions.create(
        model=NAME, prompt="Hi", max_tokens=7, logprobs=3, seed=8, extra_body={"top_k": 20}
    )

    wanted = expected(shared, tiny, "Hi", max_tokens=7, seed=8, top_k=20, top_logprobs=3)
    shown = answer.choices[0].logprobs
    np.testing.assert_allclose(shown.token_logprobs, wanted.logprobs, rtol=1e-6)
    assert shown.versions == [0] * 7
    for token, logprob, top, best in zip(
        shown.tokens, shown.token_logprobs, shown.top_logprobs, wanted.top_logprobs, strict=True
    ):
        assert 3 <= len(top) <= 4
        assert top[token] == logprob
        np.testing.assert_allclose(sorted(top.values())[-3:], sorted(best), rtol=1e-6)
    assert shown.text_offset[0] == 0
    assert sorted(shown.text_offset) == shown.text_offset
    assert shown.text_offset[-1] <= len(answer.choices[0].text)


def test_completion_logprobs_in_chunks_are_those_of_the_whole(client):
    fields = {"model": NAME, "prompt": "Hi", "max_tokens": 11, "logprobs": 2, "seed": 9}

    whole = client.completions.create(**fields).choices[0].logprobs
    chunks = list(client.completions.create(**fields, stream=True))

    shown = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset", "versions"):
        joined = [value for part in shown for value in getattr(part, name)]
        assert joined == getattr(whole, name)


def test_chat_logprobs_name_each_token_with_its_bytes(client, tiny):
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=9,
        logprobs=True,
        top_logprobs=2,
        seed=3,
        extra_body={"return_token_ids": True},
    )

    choice = answer.choices[0]
    shown = choice.logprobs.content
    raw = b"".join(bytes(token.bytes) for token in shown)
    assert raw.decode("utf-8", "replace") == choice.message.content
    assert [len(token.top_logprobs) for token in shown] == [2] * 9
    assert [token.version for token in shown] == [0] * 9
    assert len(choice.token_ids) == 9
    assert choice.prompt_token_ids == tiny.chat.encode([{"role": "user", "content": "Hi"}]).tolist()


def test_logprobs_without_alternatives(client):
    answer = client.completions.create(model=NAME, prompt="Hi", max_tokens=3, logprobs=0)

    assert len(answer.choices[0].logprobs.token_logprobs) == 3
    assert answer.choices[0].logprobs.top_logprobs is None


def test_n_choices_have_seeds_of_their_own_that_repeat_them(client):
    fields = {"model": NAME, "prompt": "Hi", "max_tokens": 12, "extra_body": {"ignore_eos": True}}

    answer = client.completions.create(**fields, n=4, seed=7)
    again = client.completions.create(**fields, n=4, seed=7)
    alone = client.completions.create(**fields, seed=answer.choices[2].seed)

    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 4
    assert texts == [choice.text for choice in again.choices]
    assert answer.choices[0].seed == 7
    assert alone.choices[0].text == texts[2]
    assert answer.usage.completion_tokens == 48
    assert answer.usage.prompt_tokens == 2


def test_requests_without_a_seed_differ(client):
    fields = {"model": NAME, "prompt": "Hi", "max_tokens": 12}

    answers = [client.completions.create(**fields).choices[0] for _ in range(3)]

    assert len({answer.text for answer in answers}) == 3
    assert len({answer.seed for answer in answers}) == 3


def test_n_streams_are_told_apart_by_their_index(client):
    fields = {"model": NAME, "prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 10, "seed": 4}

    whole = client.completions.create(**fields)
    texts = {}
    for chunk in client.completions.create(**fields, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + choice.text

    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert len(texts) == 4


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], "ids", "lists"])
def test_prompts_in_every_form_are_the_same_prompt(client, tiny, prompt):
    ids = tiny.tokenizer.encode("Hi")
    forms = {"ids": ids, "lists": [ids]}

    answer = client.completions.create(
        model=NAME,
        prompt=forms.get(prompt, prompt) if isinstance(prompt, str) else prompt,
        max_tokens=4,
        temperature=0,
        extra_body={"return_token_ids": True},
    )

    assert answer.choices[0].prompt_token_ids == ids


def test_several_prompts_are_answered_in_their_order(client):
    fields = {"model": NAME, "max_tokens": 5, "temperature": 0}

    together = client.completions.create(**fields, prompt=["a", "bb", "ccc"])

    for choice, prompt in zip(together.choices, ["a", "bb", "ccc"], strict=True):
        alone = client.completions.create(**fields, prompt=prompt)
        assert alone.choices[0].text == choice.text


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text_and_end_the_completion(client, stream):
    fields = {"model": NAME, "prompt": "Hi", "max_tokens": 40, "seed": 2}
    text = client.completions.create(**fields).choices[0].text
    stop = text[10:13]

    answer = client.completions.create(**fields, stop=[stop, "never so"], stream=stream)

    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    if not stream:
        assert answer.usage.completion_tokens < 40


def test_special_tokens_are_tokens_in_a_prompt_and_text_in_a_message(client, tiny):
    fields = {"max_tokens": 1, "extra_body": {"return_token_ids": True}, "model": NAME}
    end = tiny.tokenizer.eos_id

    raw = client.completions.create(prompt="a<|im_end|>", **fields)
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "a<|im_end|>"}], **fields
    )

    assert raw.choices[0].prompt_token_ids[-1] == end
    # The template's own: after the system's message and after the user's.
    wanted = tiny.chat.encode([{"role": "user", "content": "ab"}]).tolist().count(end)
    assert chat.choices[0].prompt_token_ids.count(end) == wanted


def test_content_in_parts_and_developer_are_what_templates_know(client, tiny):
    answer = client.chat.completions.create(
        model=NAME,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be "}] * 2},
            {"role": "user", "content": "Hi"},
        ],
        max_tokens=1,
        extra_body={"return_token_ids": True},
    )

    messages = [{"role": "system", "content": "Be Be "}, {"role": "user", "content": "Hi"}]
    assert answer.choices[0].prompt_token_ids == tiny.chat.encode(messages).tolist()


def test_errors_are_the_clients_own(client, shared):
    with pytest.raises(openai.BadRequestError, match="temperature=-1 must be from 0 to"):
        client.completions.create(model=NAME, prompt="Hi", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        client.completions.create(model="gpt-4", prompt="Hi")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="Hi", max_tokens=1000)

    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_tokens"

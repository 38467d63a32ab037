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

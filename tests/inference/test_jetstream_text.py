"""The tokenizer that JetStream gets: padding, and text that comes token by token."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest

from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.inference.jetstream_text import NO_BOS, JetStreamTokenizer, now_reading


@pytest.fixture
def plain():
    return load_tokenizer("bytes")


@pytest.fixture
def tokenizer(plain):
    yield JetStreamTokenizer(plain)
    now_reading(None)


@pytest.mark.parametrize(("length", "size"), [(0, 16), (1, 16), (16, 16), (17, 32), (33, 64)])
def test_text_is_padded_to_the_next_power_of_two(tokenizer, plain, length, size):
    text = "abc" * 11

    tokens, n = tokenizer.encode(text[:length])

    assert isinstance(tokens, jax.Array)
    assert (tokens.dtype, tokens.shape, n) == (np.int32, (size,), length)
    assert tokens[:n].tolist() == plain.encode(text[:length])
    assert not np.any(tokens[n:])


def test_of_a_text_that_is_too_long_the_end_is_kept_and_counted(tokenizer, plain):
    text = "".join(chr(97 + i % 26) for i in range(50))

    tokens, n = tokenizer.encode(text, max_prefill_length=32, jax_padding=False)

    assert isinstance(tokens, np.ndarray)
    assert (tokens.tolist(), n) == (plain.encode(text[-32:]), 32)


def test_lengths_asked_for_are_those_padded_to(tokenizer):
    tokens, n = tokenizer.encode("abc", prefill_lengths=[4, 8], jax_padding=False)

    assert (tokens.shape, n) == ((4,), 3)


def test_characters_that_the_tokenizer_does_not_know_are_left_out():
    plain = load_tokenizer("chars")

    tokens, n = JetStreamTokenizer(plain).encode("aßb", jax_padding=False)

    assert tokens[:n].tolist() == plain.encode("ab")


def test_ends_and_beginnings_are_those_of_the_tokenizer(tokenizer, plain):
    assert tokenizer.stop_tokens == set(plain.stop_ids)
    assert tokenizer.eos_id == plain.eos_id
    assert plain.prompt_prefix == ()
    assert tokenizer.bos_id == NO_BOS


def test_characters_of_two_texts_at_once_come_out_whole(tokenizer, plain):
    texts = ["Grüße 🎉!", "你好 und ŝ"]
    ids = [plain.encode(text) for text in texts]
    given = ["", ""]

    for step in range(max(map(len, ids))):
        for stream in (0, 1):
            if step < len(ids[stream]):
                now_reading(stream)
                given[stream] += tokenizer.decode([ids[stream][step]])

    assert given == texts


def test_who_reads_no_result_gets_the_text_of_the_tokens_alone(tokenizer, plain):
    found = []

    thread = threading.Thread(target=lambda: found.append(tokenizer.decode(plain.encode("né"))))
    now_reading(3)
    thread.start()
    thread.join()

    assert found == ["né"]

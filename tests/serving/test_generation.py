"""Text of a completion: whole characters, exact stop strings, however the tokens come."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import CancelledError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.scripted import ScriptedDriver

from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.errors import DeadlineError, DriverError, RequestError
from jaxrl.serving.generation import Generate, StopSearch, generate
from jaxrl.types import SamplingParams

BYTES = load_tokenizer("bytes")
PROMPT = np.array([5], np.int32)
quick = settings(max_examples=150, deadline=None)
TEXTS = st.text(st.sampled_from("abab .") | st.sampled_from("é€😀👩\u200d\u0301한"), max_size=12)


def pieces_of(driver, stop=(), stop_tokens=()):
    """All pieces of one request."""
    params = SamplingParams(99, stop_tokens=tuple(stop_tokens))

    async def collect():
        return [p async for p in generate(driver, Generate(PROMPT, params, tuple(stop)))]

    return asyncio.run(collect())


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def tokens_of(pieces):
    return [token for piece in pieces for token in piece.tokens]


def cut(ids, sizes):
    """A list of ids in chunks of these sizes, over and over."""
    chunks, place, turn = [], 0, 0
    while place < len(ids):
        size = sizes[turn % len(sizes)]
        chunks.append(ids[place : place + size])
        place, turn = place + size, turn + 1
    return chunks


def naive_stop(text, stops):
    """The text up to the stop that is complete first, found character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], end
    return text, None


@quick
@given(TEXTS, st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_pieces_together_are_the_text_of_all_ids_and_only_whole_characters(text, sizes):
    ids = BYTES.encode(text) or [2]
    pieces = pieces_of(ScriptedDriver(BYTES, cut(ids, sizes)))

    assert text_of(pieces) == BYTES.decode(ids)
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert tokens_of(pieces) == ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


@quick
@given(st.lists(st.integers(0, 258), min_size=1, max_size=20), st.integers(1, 4))
def test_pieces_of_any_bytes_are_the_text_of_all_ids(ids, size):
    pieces = pieces_of(ScriptedDriver(BYTES, cut(ids, [size])))

    assert text_of(pieces) == BYTES.decode(ids)


@quick
@given(
    TEXTS,
    st.lists(st.text(st.sampled_from("ab .é😀"), min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_stop_strings_cut_the_same_text_and_tokens_however_the_tokens_come(text, stops, sizes):
    ids = BYTES.encode(text) or [2]
    wanted, end = naive_stop(text, stops)

    pieces = pieces_of(ScriptedDriver(BYTES, cut(ids, sizes)), stops)

    assert text_of(pieces) == wanted
    assert tokens_of(pieces) == (ids if end is None else BYTES.encode(text[:end]))
    assert pieces[-1].finish_reason == ("length" if end is None else "stop")
    assert all(piece.finish_reason is None for piece in pieces[:-1])


@quick
@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_stop_search_does_not_depend_on_how_the_text_is_cut(text, stops, sizes):
    search = StopSearch(stops)

    out = [search.push(part) for part in cut(text, sizes)]
    held = not search.found and text.removeprefix("".join(out))
    out.append(search.finish())

    assert ("".join(out), search.found) == (
        naive_stop(text, stops)[0],
        naive_stop(text, stops)[1] is not None,
    )
    # What was held back could have become a stop.
    assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "text", "wanted"),
    [
        (["abcd", "bc"], "xabcd", "xa"),  # the inner one is complete first
        (["bc", "abc"], "xabcd", "x"),  # both with the same character: the longest
        (["aab"], "aaab", "a"),  # the beginning that was held back was the wrong one
        (["END"], "the EN", "the EN"),  # nothing follows: what was held back is text
        (["\n\n"], "a\n\nb", "a"),
        (["😀"], "so 😀!", "so "),
        (["\u0301"], "e\u0301x", "e"),  # a combining mark alone
        (["é"], "cafe\u0301 é", "cafe\u0301 "),  # composed and decomposed are different texts
    ],
)
def test_stop_strings_that_span_tokens_are_cut_exactly(stops, text, wanted):
    ids = BYTES.encode(text)

    for size in (1, 2, len(ids)):
        assert text_of(pieces_of(ScriptedDriver(BYTES, cut(ids, [size])), stops)) == wanted


def test_stop_string_ends_the_request_in_the_driver_and_drops_later_tokens():
    ids = BYTES.encode("one. two. three")
    driver = ScriptedDriver(BYTES, cut(ids, [4]), reason=None)  # it would go on for ever

    pieces = pieces_of(driver, ["two"])

    assert text_of(pieces) == "one. "
    assert BYTES.decode(tokens_of(pieces)) == "one. two"
    assert pieces[-1].finish_reason == "stop"
    assert driver.futures[0].cancelled()


def test_stop_token_belongs_to_the_tokens_and_not_to_the_text():
    ids = BYTES.encode("ab")
    driver = ScriptedDriver(BYTES, [ids, [*BYTES.encode("c"), BYTES.eos_id]], reason="stop")

    for stop in ((), ["never"]):
        pieces = pieces_of(driver, stop, stop_tokens=[BYTES.eos_id])

        assert text_of(pieces) == "abc"
        assert tokens_of(pieces) == [*ids, *BYTES.encode("c"), BYTES.eos_id]
        assert pieces[-1].finish_reason == "stop"


def test_unfinished_character_at_the_end_is_what_decoding_makes_of_it():
    ids = BYTES.encode("a😀")[:-1]

    pieces = pieces_of(ScriptedDriver(BYTES, cut(ids, [1])), ["x"])

    assert text_of(pieces) == BYTES.decode(ids) == "a\ufffd"


def test_pieces_carry_what_describes_each_token():
    driver = ScriptedDriver(BYTES, [[70, 71], [72]], versions=[3, 4])

    first, second, last = pieces_of(driver)

    assert first.versions + second.versions + last.versions == [3, 3, 4]
    np.testing.assert_allclose(first.logprobs + second.logprobs, [-0.07, -0.071, -0.072], rtol=1e-6)
    assert first.top == [[], []]
    assert (last.text, last.tokens, last.finish_reason) == ("", [], "length")


def test_closing_the_generator_cancels_the_request():
    driver = ScriptedDriver(BYTES, [[70]], reason=None)

    async def leave():
        request = Generate(PROMPT, SamplingParams(9), timeout=3.0)
        async with contextlib.aclosing(generate(driver, request)) as pieces:
            return await anext(pieces)

    piece = asyncio.run(leave())

    assert piece.tokens == [70]
    assert driver.timeouts == [3.0]
    with pytest.raises(CancelledError):
        driver.futures[0].result(timeout=0)


def test_cancelled_consumer_cancels_the_request():
    driver = ScriptedDriver(BYTES, [[70]], reason=None)

    async def consume():
        return [piece async for piece in generate(driver, Generate(PROMPT, SamplingParams(9)))]

    async def cancel():
        task = asyncio.create_task(consume())
        await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancel())

    assert driver.futures[0].cancelled()


def test_errors_follow_the_pieces_that_came_before_them():
    driver = ScriptedDriver(BYTES, [[70], [71]], error=DeadlineError("too late"))
    seen = []

    async def consume():
        async for piece in generate(driver, Generate(PROMPT, SamplingParams(9))):
            seen.extend(piece.tokens)

    with pytest.raises(DeadlineError, match="too late"):
        asyncio.run(consume())
    assert seen == [70, 71]


def test_logprobs_that_are_no_numbers_are_an_error_at_once():
    driver = ScriptedDriver(BYTES, [[70], [71]], versions=[1, 2], reason=None)
    chunk = driver.stream(PROMPT, None)._channel.wait()
    chunk.logprobs[0] = np.nan
    driver.stream = lambda *_, **__: _one(driver, chunk)

    with pytest.raises(DriverError, match="version 1 gave log-probability nan"):
        pieces_of(driver)
    assert driver.futures[-1].cancelled()


def _one(driver, chunk):
    """A stream that gives this chunk and stays open."""
    stream = ScriptedDriver.stream(driver, PROMPT, None)
    stream._channel._chunks.appendleft(chunk)
    return stream


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (("",), "stop string '' of 0 characters must have 1 to 1024"),
        (("x" * 1025,), "of 1025 characters must have"),
        (("a",) * 17, "17 stop strings: at most 16"),
        ((5,), "stop string 5 must be a text, not int"),
    ],
)
def test_generate_refuses_stop_strings_that_cannot_be_looked_for(stop, message):
    with pytest.raises(RequestError, match=message):
        Generate(PROMPT, SamplingParams(1), stop)

"""Text that comes out piece by piece is the text of all ids, for every kind of tokenizer."""

from __future__ import annotations

import functools

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxrl.data.streaming import TextDecoder
from jaxrl.data.tokenizers import Tokenizer, load_tokenizer

quick = settings(max_examples=150, deadline=None)
TEXTS = st.text(
    st.sampled_from("ab .\n\t")
    | st.sampled_from("é€😀👩\u200d\u0301\ufffd한")
    | st.characters(codec="utf-8")
)


def _sentencepiece() -> Tokenizer:
    """Words with a mark for the space before them, and single bytes for everything else."""
    words = ["<pad>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", "\u2581a", "\u2581b", "é", "\ufffd"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    decoders = tokenizers.decoders
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(words[:3])
    return Tokenizer(inner, "sentencepiece", pad_id=0, bos_id=1, eos_id=2)


def _wordpiece() -> Tokenizer:
    words = ["<pad>", "<bos>", "<eos>", "do", "##n", "'", "t", ".", "n't", "##s", "😀"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(words)}))
    inner.decoder = tokenizers.decoders.WordPiece()
    inner.add_special_tokens(words[:3])
    return Tokenizer(inner, "wordpiece", pad_id=0, bos_id=1, eos_id=2)


def _metaspace() -> Tokenizer:
    words = ["<pad>", "<bos>", "<eos>", "\u2581", "\u2581a", "a", "\u2581\u2581"]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({w: i for i, w in enumerate(words)}, []))
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.add_special_tokens(words[:3])
    return Tokenizer(inner, "metaspace", pad_id=0, bos_id=1, eos_id=2)


@functools.cache
def _tokenizer(name: str) -> Tokenizer:
    makers = {"sentencepiece": _sentencepiece, "wordpiece": _wordpiece, "metaspace": _metaspace}
    return makers[name]() if name in makers else load_tokenizer(name)


NAMES = ["bytes", "chars", "sentencepiece", "wordpiece", "metaspace"]
NAME = st.sampled_from(NAMES)


def _pieces(tokenizer, ids, sizes):
    """What comes out for ids that arrive in parts of these sizes, over and over."""
    decoder = TextDecoder(tokenizer)
    pieces, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(decoder.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, decoder.finish()]


@quick
@given(NAME, st.lists(st.integers(-2, 300), max_size=40), st.lists(st.integers(1, 5), min_size=1))
@example("sentencepiece", [3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + 0xFF, 260], [1])
@example("sentencepiece", [259, 259, 262, 1, 262], [1])
@example("bytes", [3 + 0xF0, 3 + 0x9F, 1, 3 + 0x98, 3 + 0x80, 3 + 0x80], [1])
def test_pieces_of_any_ids_are_the_text_of_all_ids(name, ids, sizes):
    tokenizer = _tokenizer(name)

    pieces = _pieces(tokenizer, ids, sizes)

    assert "".join(pieces) == tokenizer.decode(ids)


@quick
@given(TEXTS)
def test_pieces_of_a_text_byte_by_byte_hold_whole_characters(text):
    tokenizer = _tokenizer("bytes")

    pieces = _pieces(tokenizer, tokenizer.encode(text), [1])

    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
def test_character_of_several_bytes_comes_out_once_it_is_whole(name):
    tokenizer = _tokenizer(name)
    decoder = TextDecoder(tokenizer)
    byte_id = lambda byte: tokenizer.inner.token_to_id(f"<0x{byte:02X}>") or 3 + byte

    pieces = [decoder.push([byte_id(byte)]) for byte in "a€b".encode()]
    rest = decoder.finish()

    if name == "bytes":
        assert pieces == ["a", "", "", "€", "b"]
    else:
        # One wrong byte in a row of them would change all: the row comes out when it ends.
        assert pieces == [""] * 5
    assert "".join([*pieces, rest]) == "a€b"


def test_every_plain_token_comes_out_at_once():
    tokenizer = _tokenizer("chars")
    decoder = TextDecoder(tokenizer)

    assert [decoder.push([id_]) for id_ in tokenizer.encode("to be")] == list("to be")
    assert decoder.finish() == ""


def test_decoding_a_long_text_looks_at_the_last_tokens_only():
    tokenizer = _tokenizer("bytes")
    decoder = TextDecoder(tokenizer)

    for _ in range(1000):
        decoder.push(tokenizer.encode("né"))

    assert len(decoder._ids) <= 4

"""What single tokens look like, for tokenizers of different kinds."""

from __future__ import annotations

import tokenizers

from jaxrl.data.tokenizers import Tokenizer, load_tokenizer
from jaxrl.serving.token_texts import TokenTexts


def sentencepiece() -> Tokenizer:
    """Words with a mark for the space before them, and single bytes for everything else."""
    words = ["<pad>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a"]
    words += ["\u2581a", "é"]
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


def test_token_at_the_beginning_of_a_word_keeps_its_space():
    tokenizer = sentencepiece()
    texts = TokenTexts(tokenizer)

    assert texts.of(tokenizer.inner.token_to_id("\u2581a")) == (" a", b" a")
    assert texts.of(tokenizer.inner.token_to_id("é")) == ("é", "é".encode())


def test_part_of_a_character_has_its_bytes():
    byte_level, fallback = load_tokenizer("bytes"), sentencepiece()

    for tokenizer, offset in ((byte_level, 3), (fallback, 3)):
        texts = TokenTexts(tokenizer)
        assert texts.of(offset + 0xE2) == ("\ufffd", b"\xe2")
        assert texts.label(offset + 0xE2) == "bytes:\\xe2"
        assert texts.label(offset + ord("a")) == "a"


def test_special_token_is_its_name_and_unknown_id_has_no_bytes():
    texts = TokenTexts(load_tokenizer("bytes"))

    assert texts.of(2) == ("<eos>", b"<eos>")
    assert texts.of(9999) == ("\ufffd", None)
    assert texts.label(9999) == "\ufffd"

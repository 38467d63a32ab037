"""Round trips, unknown characters, arbitrary ids, files."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data.tokenizers import CHARACTERS, load_tokenizer
from jaxrl.errors import DataError

CHARS = load_tokenizer("chars")
BYTES = load_tokenizer("bytes")

both = pytest.mark.parametrize("tokenizer", [CHARS, BYTES], ids=["chars", "bytes"])
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def test_chars_has_one_token_for_each_character_behind_three_specials():
    assert CHARS.vocab_size == 99
    assert (CHARS.pad_id, CHARS.bos_id, CHARS.eos_id) == (0, 1, 2)
    assert CHARS.encode("\n ~") == [3, 4, 98]
    assert CHARS.encode(CHARACTERS) == list(range(3, 99))


def test_bytes_has_one_token_for_each_byte_of_utf8():
    assert BYTES.vocab_size == 259
    assert BYTES.encode("aé\n\0") == [3 + b for b in "aé\n\0".encode()]


@settings(max_examples=100, deadline=None)
@given(st.text(CHARACTERS, max_size=40))
def test_chars_any_text_of_its_alphabet_comes_back_exactly(text):
    ids = CHARS.encode(text)

    assert len(ids) == len(text)
    assert CHARS.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(unicode_text)
def test_bytes_any_text_comes_back_exactly(text):
    ids = BYTES.encode(text)

    assert len(ids) == len(text.encode())
    assert BYTES.decode(ids) == text


@both
@pytest.mark.parametrize("text", ["", " ", "  a  b ", "<eos>", "<pad> <bos>x", "\n\n", "a" * 5000])
def test_encode_delicate_text_comes_back_and_has_no_special_ids(tokenizer, text):
    ids = tokenizer.encode(text)

    assert tokenizer.decode(ids) == text
    assert all(id_ > 2 for id_ in ids)


@both
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(-(2**40), 2**40) | st.integers(0, 300), max_size=30))
def test_decode_arbitrary_ids_never_raises(tokenizer, ids):
    assert isinstance(tokenizer.decode(ids), str)


@both
def test_decode_drops_specials_and_marks_ids_outside_the_vocabulary(tokenizer):
    word = tokenizer.encode("hi")

    assert tokenizer.decode([1, *word, 2, 0]) == "hi"
    assert tokenizer.decode([*word, 5000, *word, -1]) == "hi\ufffdhi\ufffd"


def test_bytes_broken_utf8_becomes_the_replacement_character():
    assert BYTES.decode([3 + 0xC3, 3 + ord("a")]) == "\ufffda"


@pytest.mark.parametrize(
    ("text", "named"), [("naïve", r"'ï' \(U\+00EF\)"), ("a\tb", r"'\\t'"), ("\ud800", r"U\+D800")]
)
def test_chars_unknown_character_is_named(text, named):
    with pytest.raises(DataError, match=named):
        CHARS.encode(text)


def test_chars_many_unknown_characters_are_counted():
    with pytest.raises(DataError, match="and 5 more"):
        CHARS.encode("äöüßéèêâîô")


@both
def test_encode_what_is_no_text_raises(tokenizer):
    with pytest.raises(DataError, match="only str can be encoded, got bytes"):
        tokenizer.encode(b"a")


@both
@pytest.mark.parametrize("as_file", [True, False])
def test_save_then_load_gives_the_same_tokenizer(tokenizer, as_file, tmp_path):
    tokenizer.save(tmp_path / "saved")

    path = tmp_path / "saved" / "tokenizer.json" if as_file else tmp_path / "saved"
    loaded = load_tokenizer(str(path))

    text = "Spell <eos> backward:\n  neon~"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode([*loaded.encode(text), 2]) == text
    assert loaded.vocab_size == tokenizer.vocab_size
    assert (loaded.pad_id, loaded.bos_id, loaded.eos_id) == (0, 1, 2)
    assert loaded.special_tokens == {"<pad>": 0, "<bos>": 1, "<eos>": 2}


def test_saved_chars_still_names_unknown_characters(tmp_path):
    CHARS.save(tmp_path)

    with pytest.raises(DataError, match="'é'"):
        load_tokenizer(str(tmp_path)).encode("é")


def foreign(tmp_path, tokens, config=None, bos=None):
    """A word-level tokenizer.json as somebody else might have written it."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=tokens[0])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens([t for t in tokens if t.startswith("<")])
    inner.enable_truncation(max_length=2)
    inner.enable_padding(length=8)
    if bos:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    inner.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_load_tokenizer_roles_come_from_the_config_beside_the_file(tmp_path):
    config = {"eos_token": {"content": "<stop>"}, "bos_token": "<go>", "pad_token": None}
    tokens = ["<unk>", "<go>", "<stop>", "</s>", "hello"]

    loaded = load_tokenizer(foreign(tmp_path, tokens, config, bos="<go>"))

    assert (loaded.bos_id, loaded.eos_id, loaded.pad_id) == (1, 2, 2)
    assert loaded.prompt_prefix == (1,)
    # Neither the file's truncation and padding nor its bos belong to a text.
    assert loaded.encode("hello hello hello") == [4, 4, 4]


def test_load_tokenizer_without_config_finds_well_known_names(tmp_path):
    loaded = load_tokenizer(foreign(tmp_path, ["<unk>", "</s>", "hello"]))

    assert (loaded.bos_id, loaded.eos_id, loaded.pad_id) == (None, 1, 1)
    assert loaded.prompt_prefix == ()


def test_load_tokenizer_without_end_token_raises(tmp_path):
    with pytest.raises(DataError, match="has no end-of-sequence token"):
        load_tokenizer(foreign(tmp_path, ["<unk>", "hello"]))


def test_load_tokenizer_declared_token_that_is_missing_raises(tmp_path):
    with pytest.raises(DataError, match=r"has no token '<end>', declared as its eos"):
        load_tokenizer(foreign(tmp_path, ["<unk>", "hello"], {"eos_token": "<end>"}))


def test_load_tokenizer_unknown_name_says_what_there_is():
    with pytest.raises(DataError, match="'char' must be 'chars', 'bytes' or the path"):
        load_tokenizer("char")


def test_load_tokenizer_broken_file_raises_with_the_path(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")

    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer\.json"):
        load_tokenizer(str(path))

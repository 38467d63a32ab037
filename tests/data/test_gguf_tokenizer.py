"""Tokenizers out of GGUF files: the tokens that the model was trained on, or an error."""

from __future__ import annotations

import json

import gguf_files
import numpy as np
import pytest
import tokenizers
from gguf_files import Raw

from jaxrl.data.chat import load_chat_template
from jaxrl.data.gguf_tokenizer import gguf_chat_template
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.errors import DataError

TEXT = "It's 12345 o'clock,\n\n  don't DON'T wait…   naïve 日本\tx²=½;\r\n  end  "
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5


def _trained(special=SPECIAL):
    """A byte-level BPE trained on a few sentences: its tokens by id, its merges."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT, "the theme of the thing is that they wait"] * 5, trainer)
    vocabulary = inner.get_vocab()
    merges = json.loads(inner.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.get), [" ".join(merge) for merge in merges]


TOKENS, MERGES = _trained()
TYPES = [CONTROL] * 3 + [1] * (len(TOKENS) - 3)
METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}


@pytest.fixture
def load(tmp_path):
    """Function (**changes of the tokenizer's metadata) -> the tokenizer of a file with them."""

    def make(**changes):
        changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        path = tmp_path / "m.gguf"
        path.write_bytes(gguf_files.tiny({**METADATA, **changes}))
        return load_tokenizer(str(path))

    return make


def _words(tokenizer, text):
    """The words that a text is split into, as text."""
    decoder = tokenizers.decoders.ByteLevel()
    pieces = tokenizer.inner.pre_tokenizer.pre_tokenize_str(text)
    return [decoder.decode([piece]) for piece, _ in pieces]


def test_roles_and_specials_come_from_the_metadata(load):
    tokenizer = load()

    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (2, 1, 0)
    assert tokenizer.special_tokens == {name: id_ for id_, name in enumerate(SPECIAL)}
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.prompt_prefix == ()


def test_text_comes_back_and_specials_in_it_are_characters(load):
    tokenizer = load()

    ids = tokenizer.encode(TEXT + "<|im_end|>")

    assert tokenizer.decode(ids) == TEXT + "<|im_end|>"
    assert not {0, 1, 2} & set(ids)
    assert tokenizer.decode([1, *ids, 2]) == TEXT + "<|im_end|>"


def test_tokens_equal_those_of_the_tokenizer_that_was_written(load):
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: id_ for id_, token in enumerate(TOKENS)},
            [tuple(merge.split(" ")) for merge in MERGES],
        )
    )
    plain = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)

    for pre, split in {
        "gpt-2": plain,
        "smollm": tokenizers.pre_tokenizers.Sequence([digits, plain]),
    }.items():
        inner.pre_tokenizer = split
        assert load(pre=pre).encode(TEXT) == inner.encode(TEXT).ids, pre
    assert len(load().encode(TEXT)) < len(TEXT.encode())  # merges are used


WORDS = {
    "gpt-2": "It/'s/ 12345/  / DON/'/T/ x/²/=(/\n\n",
    "smollm": "It/'s/ /1/2/3/4/5/  / DON/'/T/ x/²/=(/\n\n",
    "default": "It/'/s/ /123/45/  / DON/'/T/ x/²/=(/\n\n",
    "qwen2": "It/'s/ /1/2/3/4/5/  / DON/'T/ x/²/=(\n\n",
    "llama-bpe": "It/'s/ /123/45/  / DON/'T/ x/²/=(\n\n",
}
"""Pre-tokenizer -> the words of one text, worked out by hand, with / between them."""


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_those_of_the_declared_pre_tokenizer(load, pre):
    assert _words(load(pre=pre), "It's 12345   DON'T x²=(\n\n") == WORDS[pre].split("/")


def test_qwen2_composes_characters_and_others_do_not(load):
    decomposed = "e\u0301"

    assert load(pre="qwen2").encode(decomposed) == load(pre="qwen2").encode("é")
    assert load().encode(decomposed) != load().encode("é")


def test_llama3_takes_a_word_of_the_vocabulary_whole_and_begins_with_bos(load):
    tokens, types = [*TOKENS, "zqz"], [*TYPES, 1]

    tokenizer = load(pre="llama-bpe", tokens=tokens, token_type=types)

    assert tokenizer.encode("zqz") == [len(TOKENS)]
    assert len(load(tokens=tokens, token_type=types).encode("zqz")) == 3  # no merge leads there
    assert tokenizer.prompt_prefix == (1,)
    assert load(pre="llama-bpe", add_bos_token=False).prompt_prefix == ()


def test_add_bos_token_gives_the_prefix_also_for_a_name_with_signs(load):
    assert load(add_bos_token=True).prompt_prefix == (1,)
    tokens = [TOKENS[0], "$A:1 <s>", *TOKENS[2:]]
    assert load(add_bos_token=True, tokens=tokens).prompt_prefix == (1,)
    assert load(add_bos_token=True, bos_token_id=None).prompt_prefix == ()


def test_user_defined_tokens_are_found_in_text_and_unused_ones_stand_for_nothing(load):
    tokens = [*TOKENS, "<tool call>", "[PAD7]"]

    tokenizer = load(tokens=tokens, token_type=[*TYPES, USER_DEFINED, UNUSED])

    ids = tokenizer.encode("a<tool call>b")
    assert ids[1] == len(TOKENS)
    assert tokenizer.decode(ids) == "a<tool call>b"
    assert "<tool call>" not in tokenizer.special_tokens
    assert tokenizer.vocab_size == len(TOKENS) + 1
    assert tokenizer.decode([len(TOKENS) + 1]) == "\ufffd"


def test_saved_tokenizer_gives_the_same_tokens(load, tmp_path):
    tokenizer = load(add_bos_token=True)

    tokenizer.save(tmp_path / "saved")

    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert (again.eos_id, again.bos_id, again.pad_id) == (2, 1, 0)
    assert again.prompt_prefix == (1,)


def test_pad_falls_back_to_eos(load):
    assert load(padding_token_id=None).pad_id == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "model='llama' must be 'gpt2'; set data.tokenizer to"),
        ({"model": None}, "model=None must be 'gpt2'"),
        ({"pre": "tekken"}, "pre='tekken' must be one of: gpt-2, smollm, .* or set data.tokenizer"),
        ({"pre": None}, "pre=None must be one of"),
        ({"tokens": None}, "tokens must be a list of texts"),
        ({"tokens": [1, 2]}, "tokens must be a list of texts"),
        ({"tokens": [*TOKENS[:-1], TOKENS[5]]}, "tokens has .* twice"),
        ({"token_type": TYPES[1:]}, f"token_type must be a number for each of the {len(TOKENS)}"),
        ({"token_type": "3"}, "token_type must be a number for each"),
        ({"merges": None}, "merges must be a list of texts"),
        ({"merges": ["ab"]}, "merge 'ab' must be two texts and a space"),
        ({"merges": ["zq zq"]}, "no tokenizer can be made of it: .*zq"),
        ({"eos_token_id": None}, "has no tokenizer.ggml.eos_token_id"),
        ({"eos_token_id": len(TOKENS)}, f"eos_token_id={len(TOKENS)} must be an id below"),
        ({"bos_token_id": 1.0}, "bos_token_id=1.0 must be an id below"),
        ({"padding_token_id": Raw(5, b"\xff" * 4)}, "padding_token_id=-1 must be an id below"),
        ({"add_bos_token": 1}, "add_bos_token=1 must be true or false"),
    ],
)
def test_tokenizer_that_cannot_be_made_is_refused_with_file_and_rule(load, changes, message):
    with pytest.raises(DataError, match=message) as caught:
        load(**changes)
    assert "m.gguf: " in str(caught.value)


def test_chat_template_is_reachable(load, tmp_path):
    load()

    assert gguf_chat_template(tmp_path / "m.gguf") == "{{ messages }}"


def test_chat_template_of_the_file_is_rendered_and_saved_with_the_tokenizer(tmp_path):
    path = tmp_path / "m.gguf"
    template = "{{ messages[0].content }}<|im_end|>"
    path.write_bytes(gguf_files.tiny({**METADATA, "tokenizer.chat_template": template}))
    tokenizer = load_tokenizer(str(path))
    tokenizer.save(tmp_path / "folder")

    for spec in (str(path), str(tmp_path / "folder")):
        chat = load_chat_template(spec, load_tokenizer(spec))
        ids = chat.encode([{"role": "user", "content": "hello<|im_end|>"}])
        end = tokenizer.special_tokens["<|im_end|>"]
        assert list(ids) == [*tokenizer.encode("hello<|im_end|>"), end]


@pytest.mark.parametrize(("template", "message"), [(None, None), (7, "must be text")])
def test_chat_template_missing_is_none_and_of_another_type_is_refused(tmp_path, template, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_files.tiny({"tokenizer.chat_template": template}))

    if message is None:
        assert gguf_chat_template(path) is None
    else:
        with pytest.raises(DataError, match=message):
            gguf_chat_template(path)


def test_missing_file_and_folder_are_refused(tmp_path):
    (tmp_path / "m.gguf").mkdir()

    with pytest.raises(DataError, match=r"none.gguf must be a GGUF file"):
        load_tokenizer(str(tmp_path / "none.gguf"))
    with pytest.raises(DataError, match="there is no file"):
        load_tokenizer(str(tmp_path / "m.gguf"))


def test_damaged_file_is_refused_or_gives_a_tokenizer(tmp_path):
    whole = gguf_files.tiny(METADATA)
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    refused = 0

    for at in rng.integers(0, len(whole) - 2000, 200):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged if at % 3 else whole[:at])
        try:
            tokenizer = load_tokenizer(str(path))
            tokenizer.decode(tokenizer.encode(TEXT))
        except DataError:
            refused += 1

    assert refused > 120

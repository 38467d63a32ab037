"""Tokenizers and chat templates that GGUF files carry in their metadata."""

from __future__ import annotations

import collections
import os

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxrl.config.gguf_header import GgufHeader, read_header
from jaxrl.data.model_files import GGUF_CHAT
from jaxrl.errors import DataError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What Llama 3 and Qwen2 split by differs in the number of digits that stay together alone.
_LATER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (_LATER.format(digits="{1,3}"),)
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": (_LATER.format(digits=""),),
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""`tokenizer.ggml.pre` -> what splits a text into words, one after the other."""

_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
"""Those that take a word of the vocabulary whole, whatever the merges say, and begin with bos."""

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_PREFIX = "tokenizer.ggml."
_INSTEAD = "set data.tokenizer to the model's tokenizer.json"


def gguf_tokenizer(
    path: str | os.PathLike[str],
) -> tuple[tokenizers.Tokenizer, dict[str, int | None]]:
    """The byte-level BPE tokenizer in the GGUF file `path`, and the ids of its eos, bos and pad.

    pad falls back to eos; bos may be None. Raises `DataError` for a damaged file, for another kind
    of tokenizer, and for a pre-tokenizer that is unknown or not declared: a guess would give other
    tokens than those that the model was trained on.
    """
    header = read_header(path, DataError)
    kind = header.metadata.get(f"{_PREFIX}model")
    if kind != "gpt2":
        raise DataError(f"{path}: {_PREFIX}model={kind!r} must be 'gpt2'; {_INSTEAD}")
    pre = header.metadata.get(f"{_PREFIX}pre")
    if not isinstance(pre, str) or pre not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise DataError(f"{path}: {_PREFIX}pre={pre!r} must be one of: {known}; or {_INSTEAD}")
    tokens, kinds = _tokens(header)
    roles = _roles(header, tokens)
    inner = tokenizers.Tokenizer(_bpe(header, tokens, kinds, pre in _WHOLE_WORDS))
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    inner.decoder = decoders.ByteLevel()
    _add_tokens(inner, tokens, kinds)
    if _flag(header, "add_bos_token", pre in _WHOLE_WORDS) and roles["bos"] is not None:
        bos = {"id": "bos", "ids": [roles["bos"]], "tokens": [tokens[roles["bos"]]]}
        inner.post_processor = processors.TemplateProcessing(
            single=["bos", "$A"], special_tokens=[bos]
        )
    return inner, roles


def gguf_chat_template(path: str | os.PathLike[str]) -> str | None:
    """The Jinja template of conversations in the GGUF file `path`; None where it has none.

    Raises `DataError` for a damaged file.
    """
    template = read_header(path, DataError).metadata.get(GGUF_CHAT)
    if template is not None and not isinstance(template, str):
        raise DataError(f"{path}: {GGUF_CHAT} must be text")
    return template


def _tokens(header: GgufHeader) -> tuple[list[str], np.ndarray]:
    """Text of each id, and its kind."""
    tokens = _texts(header, "tokens")
    if len(set(tokens)) != len(tokens):
        (twice, _), *_ = collections.Counter(tokens).most_common(1)
        raise DataError(f"{header.path}: {_PREFIX}tokens has {twice!r} twice")
    kinds = header.metadata.get(f"{_PREFIX}token_type", np.full(len(tokens), _NORMAL))
    if not isinstance(kinds, np.ndarray) or kinds.shape != (len(tokens),):
        rule = f"a number for each of the {len(tokens)} tokens"
        raise DataError(f"{header.path}: {_PREFIX}token_type must be {rule}")
    return tokens, kinds


def _texts(header: GgufHeader, key: str) -> list[str]:
    texts = header.metadata.get(f"{_PREFIX}{key}")
    if not isinstance(texts, list) or not texts:
        raise DataError(f"{header.path}: {_PREFIX}{key} must be a list of texts; {_INSTEAD}")
    return texts


def _bpe(header: GgufHeader, tokens: list[str], kinds: np.ndarray, whole_words: bool) -> models.BPE:
    # Unused ids stand for no text: a sampled one must not come out as "[PAD151936]".
    vocabulary = {token: id_ for id_, token in enumerate(tokens) if kinds[id_] != _UNUSED and token}
    merges = []
    for merge in _texts(header, "merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise DataError(f"{header.path}: the merge {merge!r} must be two texts and a space")
        merges.append((left, right))
    try:
        return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words)
    except Exception as error:  # the package raises nothing more precise
        raise DataError(f"{header.path}: no tokenizer can be made of it: {error}") from None


def _add_tokens(inner: tokenizers.Tokenizer, tokens: list[str], kinds: np.ndarray) -> None:
    """Those that are found in a text before it is split into words. Only control tokens are
    special: they never come out of a text that is not a template."""
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(tokens[id_], special=special, normalized=False)
            for id_ in np.flatnonzero(kinds == kind)
            if tokens[id_]
        ]
        (inner.add_special_tokens if special else inner.add_tokens)(added)


def _roles(header: GgufHeader, tokens: list[str]) -> dict[str, int | None]:
    roles: dict[str, int | None] = {}
    for role, key in (("eos", "eos"), ("bos", "bos"), ("pad", "padding")):
        id_ = header.metadata.get(f"{_PREFIX}{key}_token_id")
        if id_ is not None and (type(id_) is not int or not 0 <= id_ < len(tokens)):
            rule = f"an id below {len(tokens)}"
            raise DataError(f"{header.path}: {_PREFIX}{key}_token_id={id_!r} must be {rule}")
        roles[role] = id_
    if roles["eos"] is None:
        raise DataError(f"{header.path}: has no {_PREFIX}eos_token_id; {_INSTEAD}")
    roles["pad"] = roles["eos"] if roles["pad"] is None else roles["pad"]
    return roles


def _flag(header: GgufHeader, key: str, default: bool) -> bool:
    value = header.metadata.get(f"{_PREFIX}{key}", default)
    if not isinstance(value, bool):
        raise DataError(f"{header.path}: {_PREFIX}{key}={value!r} must be true or false")
    return value

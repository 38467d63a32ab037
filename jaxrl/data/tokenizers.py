"""Tokenizers: two that need no files, any `tokenizer.json`, and those of GGUF files."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers

from jaxrl.config.gguf_header import is_gguf
from jaxrl.data import model_files
from jaxrl.data.gguf_tokenizer import gguf_chat_template, gguf_tokenizer
from jaxrl.errors import DataError, JaxrlError, OutputError

BUILT_IN = ("chars", "bytes")
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHARACTERS = "\n" + "".join(map(chr, range(0x20, 0x7F)))
"""The alphabet of "chars": newline and every printable ASCII character."""

WELL_KNOWN = {
    "eos": (EOS, "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
    "bos": (BOS, "<|begin_of_text|>", "<s>"),
    "pad": (PAD, "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"),
}
"""Names tried, in this order, when no tokenizer_config.json beside the file says which is which."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text <-> token ids. Special tokens never come out of text: "<eos>" in a text is characters.

    `bos_id` is None where the vocabulary has no such token. `vocab_size` is the highest id + 1.
    Sampling stops at any of `stop_ids`, of which `eos_id` is one. `role_tokens` ("bos_token" and
    so on, with their texts) and `chat_templates` (name -> source) are those of the model's folder.
    """

    inner: tokenizers.Tokenizer
    name: str
    pad_id: int
    eos_id: int
    bos_id: int | None
    stop_ids: tuple[int, ...] = ()
    role_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    chat_templates: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        stops = dict.fromkeys((self.eos_id, *self.stop_ids))
        object.__setattr__(self, "stop_ids", tuple(stops))
        if not self.role_tokens:
            object.__setattr__(self, "role_tokens", self._known_roles())
        self.inner.encode_special_tokens = True
        self.inner.no_padding()
        self.inner.no_truncation()

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of ids that a model's embedding must have rows for."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the special tokens, which only a template may contain."""
        added = self.inner.get_added_tokens_decoder()
        return {token.content: id_ for id_, token in added.items() if token.special}

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of the special tokens."""
        return frozenset(self.special_tokens.values())

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches any special token, the longest one first."""
        names = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")

    @functools.cached_property
    def special_beginnings(self) -> frozenset[str]:
        """The texts that begin special tokens, of those that do not begin like a word."""
        names = [name for name in self.special_tokens if not name[0].isalnum()]
        cuts = {name[:length] for name in names for length in range(1, len(name))}
        return frozenset(cut for cut in cuts if cut.strip())

    @functools.cached_property
    def longest_special(self) -> int:
        """Characters of the longest special token."""
        return max(map(len, self.special_tokens), default=0)

    @functools.cached_property
    def special_strips(self) -> dict[int, tuple[bool, bool]]:
        """Id -> whether the special token swallows white space on its left, and on its right."""
        added = self.inner.get_added_tokens_decoder()
        return {id_: (token.lstrip, token.rstrip) for id_, token in added.items() if token.special}

    @functools.cached_property
    def beginning_matters(self) -> bool:
        """Whether a text is encoded otherwise behind a special token than at the beginning."""
        strips = self.special_strips
        plain = (t for t, id_ in self.special_tokens.items() if strips[id_] == (False, False))
        special = next(plain, None)
        behind = None if special is None else self.encode_with_specials(special + "a")
        return (
            behind is not None
            and behind[1:] != self.inner.encode("a", add_special_tokens=False).ids
        )

    @functools.cached_property
    def prompt_prefix(self) -> tuple[int, ...]:
        """What the tokenizer wants before a text: (bos_id,) or nothing."""
        around = self.inner.encode("", add_special_tokens=True).ids
        return (self.bos_id,) if self.bos_id is not None and self.bos_id in around else ()

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without bos or eos. Raises `DataError` for unknown characters."""
        if not isinstance(text, str):
            raise DataError(f"only str can be encoded, got {type(text).__name__}")
        try:
            return self.inner.encode(text, add_special_tokens=False).ids
        # The package raises bare Exception for unknown tokens, TypeError for lone surrogates.
        except Exception as error:
            raise DataError(self._explain(text, error)) from None

    def encode_with_specials(self, text: str) -> list[int] | None:
        """Ids of a text that is trusted to hold special tokens; None if it cannot be encoded."""
        try:
            return self._with_specials.encode(text, add_special_tokens=False).ids
        except Exception:
            return None

    @functools.cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        # A copy: switching the other one over would be seen by every thread that uses it.
        copy = tokenizers.Tokenizer.from_str(self.inner.to_str())
        copy.encode_special_tokens = False
        return copy

    def decode(self, ids: Iterable[int]) -> str:
        """Text of any ids, without special tokens; never raises.

        Ids outside the vocabulary and bytes that are not UTF-8 become U+FFFD.
        """
        pieces: list[str] = []
        known: list[int] = []
        for id_ in map(int, ids):
            if 0 <= id_ < self.vocab_size:
                known.append(id_)
                continue
            pieces += [self.inner.decode(known, skip_special_tokens=True), "\ufffd"]
            known = []
        return "".join([*pieces, self.inner.decode(known, skip_special_tokens=True)])

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat templates into a folder.

        Several stop ids go into generation_config.json, where others look for them. Raises
        `OutputError`.
        """
        folder = Path(path)
        try:
            self._save(folder)
        except JaxrlError:
            raise
        # The package raises bare Exception for what the system refuses.
        except Exception as error:
            raise OutputError(f"cannot write the tokenizer to {folder}: {error}") from None

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.inner.save(str(folder / "tokenizer.json"))
        # The roles that are known by their ids come last: pad, for one, has always an id.
        config = {**self.role_tokens, **self._known_roles()}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        model_files.write_chat_templates(folder, self.chat_templates)
        if len(self.stop_ids) > 1:
            model_files.write_stop_ids(folder, self.stop_ids)

    def _known_roles(self) -> dict[str, str]:
        """Role -> text of the tokens whose ids are known."""
        roles = {"eos_token": self.eos_id, "pad_token": self.pad_id, "bos_token": self.bos_id}
        return {role: self.inner.id_to_token(id_) for role, id_ in roles.items() if id_ is not None}

    def _explain(self, text: str, error: Exception) -> str:
        """Which characters cannot be encoded."""
        unknown = []
        for character in sorted(set(text)):
            try:
                self.inner.encode(character, add_special_tokens=False)
            except Exception:
                unknown.append(f"{character!r} (U+{ord(character):04X})")
        if not unknown:
            return f"tokenizer {self.name!r} cannot encode {text[:40]!r}: {error}"
        shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if unknown[5:] else "")
        return (
            f"tokenizer {self.name!r} has no token for {shown} in {text[:40]!r}; "
            "the tokenizer 'bytes' has one for every character"
        )


def load_tokenizer(spec: str) -> Tokenizer:
    """ "chars", "bytes", or the path of a tokenizer.json, its folder, or a GGUF file.

    chars: 99 ids, one for each printable ASCII character and newline. bytes: 259 ids, one for each
    byte of the UTF-8 text. Both have pad 0, bos 1, eos 2. For files, eos, bos and pad come from
    tokenizer_config.json beside the file, else from well-known names (those of a GGUF file from
    its metadata); pad falls back to eos. More stop ids come from generation_config.json. Raises
    `DataError`.
    """
    if spec in BUILT_IN:
        return _built_in(spec, _chars() if spec == "chars" else _bytes())
    if is_gguf(spec):
        return _from_gguf(spec)
    path = Path(spec)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(
            f"tokenizer={spec!r} must be 'chars', 'bytes' or the path of a tokenizer.json or of a "
            f"GGUF file; there is no file {str(path)!r}"
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise DataError(f"{path} is not a tokenizer.json: {error}") from None
    return _with_roles(inner, path)


def _from_gguf(path: str) -> Tokenizer:
    inner, ids = gguf_tokenizer(path)
    template = gguf_chat_template(path)
    return Tokenizer(
        inner,
        path,
        pad_id=ids["pad"],
        eos_id=ids["eos"],
        bos_id=ids["bos"],
        chat_templates={} if template is None else {"default": template},
    )


def _built_in(name: str, inner: tokenizers.Tokenizer) -> Tokenizer:
    inner.add_special_tokens([PAD, BOS, EOS])
    return Tokenizer(inner, name, pad_id=0, bos_id=1, eos_id=2)


def _chars() -> tokenizers.Tokenizer:
    vocabulary = {token: id_ for id_, token in enumerate([PAD, BOS, EOS, *CHARACTERS])}
    # Without an unknown token, so that an unknown character is an error and not a hole.
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"[\s\S]"), behavior="isolated"
    )
    inner.decoder = tokenizers.decoders.Fuse()
    return inner


def _bytes() -> tokenizers.Tokenizer:
    vocabulary = {PAD: 0, BOS: 1, EOS: 2}
    vocabulary |= {symbol: 3 + byte for byte, symbol in enumerate(byte_symbols())}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner


def byte_symbols() -> list[str]:
    """The character that stands for each byte 0…255 in byte-level vocabularies (GPT-2's table).

    Printable bytes stand for themselves, the others for the characters from U+0100 on.
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in itself else next(others)) for byte in range(256)]


def _with_roles(inner: tokenizers.Tokenizer, path: Path) -> Tokenizer:
    """Find out which ids are eos, bos and pad."""
    declared = model_files.role_tokens(path.parent)
    ids: dict[str, int | None] = {}
    for role, names in WELL_KNOWN.items():
        token = declared.get(f"{role}_token")
        if token is not None:
            ids[role] = inner.token_to_id(token)
            if ids[role] is None:
                raise DataError(f"{path} has no token {token!r}, declared as its {role}")
        else:
            found = (inner.token_to_id(name) for name in names)
            ids[role] = next((id_ for id_ in found if id_ is not None), None)
    if ids["eos"] is None:
        raise DataError(
            f"{path} has no end-of-sequence token: tokenizer_config.json beside it declares no "
            f"eos_token, and none of {WELL_KNOWN['eos']} is in the vocabulary"
        )
    return Tokenizer(
        inner,
        str(path),
        pad_id=ids["eos"] if ids["pad"] is None else ids["pad"],
        eos_id=ids["eos"],
        bos_id=ids["bos"],
        stop_ids=model_files.stop_ids(path.parent, inner),
        role_tokens=declared,
        chat_templates=model_files.chat_templates(path.parent),
    )

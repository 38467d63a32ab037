"""Tokenizers: two that need no files, any `tokenizer.json`, and those of GGUF files."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from jaxrl.config.gguf_header import is_gguf
from jaxrl.data.gguf_tokenizer import gguf_tokenizer
from jaxrl.errors import DataError

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
    """

    inner: tokenizers.Tokenizer
    name: str
    pad_id: int
    eos_id: int
    bos_id: int | None

    def __post_init__(self) -> None:
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
        """Write tokenizer.json and tokenizer_config.json into the folder `path`."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        roles = {"eos_token": self.eos_id, "pad_token": self.pad_id, "bos_token": self.bos_id}
        names = {
            role: self.inner.id_to_token(id_) for role, id_ in roles.items() if id_ is not None
        }
        self.inner.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")

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
    its metadata); pad falls back to eos.
    Raises `DataError`.
    """
    if spec == "chars":
        return _built_in("chars", _chars())
    if spec == "bytes":
        return _built_in("bytes", _bytes())
    if is_gguf(spec):
        inner, ids = gguf_tokenizer(spec)
        return Tokenizer(inner, spec, pad_id=ids["pad"], eos_id=ids["eos"], bos_id=ids["bos"])
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
    vocabulary |= {symbol: 3 + byte for byte, symbol in enumerate(_byte_symbols())}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner


def _byte_symbols() -> list[str]:
    """The character that stands for each byte 0…255 in byte-level vocabularies (GPT-2's table).

    Printable bytes stand for themselves, the others for the characters from U+0100 on.
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in itself else next(others)) for byte in range(256)]


def _with_roles(inner: tokenizers.Tokenizer, path: Path) -> Tokenizer:
    """Find out which ids are eos, bos and pad."""
    declared = _declared_roles(path.with_name("tokenizer_config.json"))
    ids: dict[str, int | None] = {}
    for role, names in WELL_KNOWN.items():
        if role in declared:
            ids[role] = inner.token_to_id(declared[role])
            if ids[role] is None:
                raise DataError(f"{path} has no token {declared[role]!r}, declared as its {role}")
        else:
            found = (inner.token_to_id(name) for name in names)
            ids[role] = next((id_ for id_ in found if id_ is not None), None)
    if ids["eos"] is None:
        raise DataError(
            f"{path} has no end-of-sequence token: tokenizer_config.json beside it declares no "
            f"eos_token, and none of {WELL_KNOWN['eos']} is in the vocabulary"
        )
    pad = ids["eos"] if ids["pad"] is None else ids["pad"]
    return Tokenizer(inner, str(path), pad_id=pad, eos_id=ids["eos"], bos_id=ids["bos"])


def _declared_roles(path: Path) -> dict[str, str]:
    """Role -> token text in a tokenizer_config.json; nothing where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    roles = {}
    for role in WELL_KNOWN:
        token = content.get(f"{role}_token")
        # Older files hold a record with the text in "content".
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            roles[role] = token
    return roles

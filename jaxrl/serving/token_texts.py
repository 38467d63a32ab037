"""What single tokens look like, for those who ask for log-probabilities."""

from __future__ import annotations

import functools
import re

from jaxrl.data.tokenizers import Tokenizer, byte_symbols

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNFINISHED = "\ufffd"


class TokenTexts:
    """Token id -> its text and its bytes. One for each tokenizer: what was asked once is kept."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._names = {id_: name for name, id_ in tokenizer.special_tokens.items()}
        self._bytes = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        # Some tokenizers show a word without its space where nothing stands before it.
        known = tokenizer.encode_with_specials("a") or []
        self._before = [id_ for id_ in known if id_ not in tokenizer.special_ids]
        self.of = functools.lru_cache(maxsize=1 << 16)(self._of)

    def _of(self, id_: int) -> tuple[str, bytes | None]:
        """(text, bytes). The text of a part of a character holds U+FFFD, and its bytes are None
        where the tokenizer does not tell them. A special token is its name."""
        if id_ in self._names:
            return self._names[id_], self._names[id_].encode()
        text = self._shown(id_)
        if _UNFINISHED not in text:
            return text, text.encode()
        return text, self._raw(id_)

    def _shown(self, id_: int) -> str:
        decode = self.tokenizer.decode
        before, both = decode(self._before), decode([*self._before, id_])
        return both[len(before) :] if both.startswith(before) else decode([id_])

    def _raw(self, id_: int) -> bytes | None:
        """The bytes of a token that is no whole character."""
        if not 0 <= id_ < self.tokenizer.vocab_size:
            return None
        name = self.tokenizer.inner.id_to_token(id_) or ""
        if match := _BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        known = bool(name) and all(symbol in self._bytes for symbol in name)
        return bytes(self._bytes[symbol] for symbol in name) if known else None

    def label(self, id_: int) -> str:
        """The text as OpenAI's completions show it: bytes where it is no whole character."""
        text, raw = self.of(id_)
        if _UNFINISHED not in text or raw is None:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

"""Text of token ids that arrive bit by bit: only whole characters come out, and none changes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jaxrl.data.tokenizers import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNFINISHED = "\ufffd"


class TextDecoder:
    """`push(ids)` -> the text that these ids make certain; `finish()` -> what is left.

    All pieces together are exactly `tokenizer.decode(all ids)`. Held back is what a later id could
    still change: a character of which some bytes are missing, and a run of bytes as tokens
    (`<0xE2>`), which becomes text only as a whole.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._specials = frozenset(tokenizer.special_tokens.values())
        # `_ids[:_context]` came out already. They stay, because what a token looks like may depend
        # on whether one stands before it (the space at the start of a word).
        self._ids: list[int] = []
        self._context = 0
        self._given = 0  # characters of the text of `_ids` that came out

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain now and was not before; often ""."""
        self._ids += map(int, ids)
        seen = [id_ for id_ in self._ids[self._context :] if self._visible(id_)]
        if not seen or self._is_byte(seen[-1]):
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_UNFINISHED):
            return self._give(text, len(text) - 1)
        piece = self._give(text, len(text))
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        self._given = len(self._tokenizer.decode(self._ids))
        return piece

    def finish(self) -> str:
        """The rest, as it is when no id follows. The decoder then begins a new text."""
        text = self._tokenizer.decode(self._ids)
        piece = self._give(text, len(text))
        self._ids, self._context, self._given = [], 0, 0
        return piece

    def _give(self, text: str, end: int) -> str:
        """The characters up to `end` that have not come out yet."""
        start, self._given = self._given, max(self._given, end)
        return text[start:end]

    def _visible(self, id_: int) -> bool:
        """Whether the id has a place in the text, as special tokens have not."""
        if not 0 <= id_ < self._tokenizer.vocab_size:
            return True
        return id_ not in self._specials and self._tokenizer.inner.id_to_token(id_) is not None

    def _is_byte(self, id_: int) -> bool:
        if not 0 <= id_ < self._tokenizer.vocab_size:
            return False
        return _BYTE.fullmatch(self._tokenizer.inner.id_to_token(id_) or "") is not None

"""A tokenizer as JetStream's driver wants one: padding, and text that comes token by token."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl.data.streaming import TextDecoder
from jaxrl.data.tokenizers import Tokenizer
from jaxrl.errors import DataError
from jaxrl.observe.logger import get_logger

NO_BOS = -1
"""Stands for the token that JetStream puts before every prompt where a model knows no such token;
the engine takes it away again."""

SHORTEST, LONGEST = 16, 32768
"""Lengths that JetStream pads prompts to are the powers of two between these."""

_KEPT = 4096
"""Texts in progress that a tokenizer remembers."""

_log = get_logger("jetstream")
_reading = threading.local()


def now_reading(stream: int | None) -> None:
    """Tells the tokenizers of this thread which request the next token is of, if known."""
    _reading.stream = stream


def padded_length(length: int, lengths: Sequence[int]) -> int:
    """The smallest of ascending `lengths` that holds `length` tokens; the last if none does."""
    return next((size for size in lengths if size >= length), lengths[-1])


class JetStreamTokenizer:
    """Presents a `Tokenizer`. One may serve several threads; each text is decoded by one of them.

    JetStream decodes token by token and does not say whose token it is; results say it instead
    (`now_reading`), so that characters of several tokens come out whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: collections.OrderedDict[int, TextDecoder] = collections.OrderedDict()

    def encode(self, s: str, **options: Any) -> tuple[Any, int]:
        """Text -> (its tokens, padded at the end; how many are the text's).

        Options are `is_bos` (default True: begin as the tokenizer wants a text to begin),
        `prefill_lengths` (ascending; default: powers of two), `max_prefill_length` and
        `jax_padding` (default True: a jax array). Of a text that is too long the end is kept.
        Characters that the tokenizer does not know are left out: an error would end the server.
        """
        ids = [*self._tokenizer.prompt_prefix] if options.get("is_bos", True) else []
        ids += self._encode(s)
        lengths = list(options.get("prefill_lengths") or _powers())
        most = options.get("max_prefill_length")
        if most is not None:
            lengths = [*(size for size in lengths if size < most), most]
        size = padded_length(len(ids), lengths)
        ids = ids[-size:]
        padded = np.full(size, self.pad_id, np.int32)
        padded[: len(ids)] = ids
        return (jnp.asarray(padded) if options.get("jax_padding", True) else padded), len(ids)

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """Tokens -> the text that they make certain.

        While a result is read, `token_ids` go on where the last ones of the same request ended.
        """
        stream = getattr(_reading, "stream", None)
        if stream is None:
            return self._tokenizer.decode(token_ids)
        text = self._texts.pop(stream, None)
        if text is None:
            text = TextDecoder(self._tokenizer)
        self._texts[stream] = text
        while len(self._texts) > _KEPT:
            self._texts.popitem(last=False)
        return text.push(token_ids)

    @property
    def pad_id(self) -> int:
        """What prompts are padded with; the engine never looks at it."""
        return 0

    @property
    def eos_id(self) -> int:
        """The token that ends a text."""
        return self._tokenizer.eos_id

    @property
    def bos_id(self) -> int:
        """What JetStream puts before token prompts; `NO_BOS` where texts begin with nothing."""
        return next(iter(self._tokenizer.prompt_prefix), NO_BOS)

    @property
    def stop_tokens(self) -> set[int]:
        """The tokens that end a completion."""
        return set(self._tokenizer.stop_ids)

    def _encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except DataError as error:
            _log.warning("part of a prompt is left out: %s", error)
        return [id_ for character in text for id_ in self._encode_one(character)]

    def _encode_one(self, character: str) -> list[int]:
        try:
            return self._tokenizer.encode(character)
        except DataError:
            return []


def _powers() -> list[int]:
    return [1 << i for i in range(SHORTEST.bit_length() - 1, LONGEST.bit_length())]

"""A driver whose tokens a test chooses: real streams and futures, no model behind them."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np

from jaxrl.inference.streaming import Channel, Chunk, TokenStream
from jaxrl.types import Completion


class ScriptedDriver:
    """Answers every request with `chunks`, lists of token ids, and then with `reason` or `error`.

    `streams` holds what was handed out, so that a test can see whether it was cancelled.
    """

    failure = None
    engine = SimpleNamespace(max_length=64)

    def __init__(self, tokenizer, chunks, reason="length", error=None, versions=None):
        self.tokenizer = tokenizer
        self._chunks, self._reason, self._error = chunks, reason, error
        self._versions = versions or [0] * len(chunks)
        self.futures = []
        self.timeouts = []

    def stream(self, tokens, params, *, timeout=None):
        """Everything at once, unless the completion is to stay open (`reason` None)."""
        channel, future = Channel(), Future()
        self.futures.append(future)
        self.timeouts.append(timeout)
        future.add_done_callback(lambda _: channel.end())
        chunks = [
            chunk_of(ids, version)
            for ids, version in zip(self._chunks, self._versions, strict=True)
        ]
        for chunk in chunks:
            channel.put(chunk)
        if self._error is not None:
            future.set_exception(self._error)
        elif self._reason is not None:
            arrays = (np.concatenate([getattr(c, n) for c in chunks]) for n in NAMES)
            future.set_result(Completion(*arrays, self._reason))
        return TokenStream(future, channel)


NAMES = ("tokens", "logprobs", "versions")


def chunk_of(ids, version=0) -> Chunk:
    """A chunk of these ids; the log-probability of id i is -i / 1000."""
    ids = np.array(ids, np.int32)
    return Chunk(ids, (-ids / 1000).astype(np.float32), np.full(len(ids), version, np.int32))

"""Computed pieces of prompts, kept for later requests that begin alike."""

from __future__ import annotations

import collections
import hashlib
import warnings
from collections.abc import Sequence

import numpy as np

from jaxrl.inference.state import Prefix

Block = tuple[Prefix, int]
"""A piece that was computed: row of a prefix."""


def piece_keys(prompt: np.ndarray, chunk: int, version: int) -> list[bytes]:
    """prompt int32 [P] -> one key for each of its pieces of `chunk` tokens (the last one may be
    shorter).

    A key stands for the version of the weights and all tokens up to the end of its piece, so that
    equal keys mean equal keys and values. 16 bytes of BLAKE2b: two prompts share one by chance less
    often than memory fails.
    """
    keys, seen = [], version.to_bytes(8, "little", signed=True)
    for start in range(0, len(prompt), chunk):
        piece = prompt[start : start + chunk]
        seen = hashlib.blake2b(seen + piece.tobytes(), digest_size=16).digest()
        keys.append(seen)
    return keys


class PrefixCache:
    """Pieces that were used last, of together at most `limit_bytes` on the devices.

    Rows of one prefill call share its arrays, which count until the last of them is gone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self.evictions = 0
        self._blocks: collections.OrderedDict[bytes, Block] = collections.OrderedDict()
        self._users: collections.Counter[int] = collections.Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def holds(self, keys: Sequence[bytes]) -> bool:
        """Whether every one of these pieces is there."""
        return all(key in self._blocks for key in keys)

    def get(self, key: bytes) -> Block | None:
        """The piece, which becomes the most recent one; None if it is not there."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def put(self, key: bytes, block: Block) -> None:
        """Adds a piece; those used least recently make room."""
        prefix, _ = block
        if key in self._blocks or prefix.nbytes > self.limit_bytes:
            return
        self._blocks[key] = block
        self._users[id(prefix)] += 1
        if self._users[id(prefix)] == 1:
            self.nbytes += prefix.nbytes
        while self.nbytes > self.limit_bytes:
            self._evict()

    def clear(self) -> None:
        """Forgets everything."""
        self._blocks.clear()
        self._users.clear()
        self.nbytes = 0

    def _evict(self) -> None:
        _, (prefix, _) = self._blocks.popitem(last=False)
        self.evictions += 1
        self._users[id(prefix)] -= 1
        if not self._users[id(prefix)]:
            del self._users[id(prefix)]
            self.nbytes -= prefix.nbytes


def bytes_instead(prefix_cache: int, prefix_cache_bytes: int | None) -> int | None:
    """What the deprecated number of prompts means in bytes."""
    warnings.warn(
        f"prefix_cache={prefix_cache} is deprecated and counts prompts: prefix_cache_bytes bounds "
        "what is kept; 0 keeps nothing",
        FutureWarning,
        stacklevel=3,
    )
    return 0 if prefix_cache == 0 else prefix_cache_bytes

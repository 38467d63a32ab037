"""The order in which a process starts programs, kept so that it can be compared with others'."""

from __future__ import annotations

import collections
import hashlib
import json
import threading
from collections.abc import Mapping

from jaxrl.distributed.sides import name_processes, sides_of

_KEPT = 4096
"""Entries that a process remembers, to compare them with those of one that lags behind."""
_SHOWN = 8
"""Entries that a process publishes at each beat; all of them once there is a difference."""

COMPARED = 512
"""Entries of its own that a process compares with those of others at each beat."""

Tail = Mapping[int, tuple[str, str]]
"""Number of an entry -> (hash of all entries up to it, what it was)."""


class Sequence:
    """Entries in order, each with a hash over all up to it. Safe to read from another thread."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = b""
        self._entries: collections.deque[tuple[int, bytes, str]] = collections.deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def append(self, entry: str) -> None:
        """The next thing this process starts."""
        with self._lock:
            self.count += 1
            self._hash = hashlib.blake2b(self._hash + entry.encode(), digest_size=8).digest()
            self._entries.append((self.count, self._hash, entry))

    def tail(self, most: int = _KEPT) -> dict[int, tuple[str, str]]:
        """The last `most` entries."""
        with self._lock:
            entries = list(self._entries)[-most:]
        return {number: (digest.hex(), entry) for number, digest, entry in entries}

    def encode(self, most: int = _SHOWN) -> str:
        """What others need to compare theirs with: the last `most` entries."""
        return json.dumps(self.tail(most))

    def encode_all(self) -> str:
        """All that is remembered, to find where sequences began to differ."""
        return json.dumps(self.tail())


def decode_tail(text: str) -> Tail:
    """What `Sequence.encode` made."""
    return {int(number): (digest, entry) for number, (digest, entry) in json.loads(text).items()}


def first_difference(tails: Mapping[int, Tail]) -> str | None:
    """Process -> tail: the first entry that is not the same on all, in words; None without one.

    Only entries that several processes remember can be compared.
    """
    numbers = sorted({number for tail in tails.values() for number in tail})
    for number in numbers:
        known = {process: tail[number] for process, tail in tails.items() if number in tail}
        if len({digest for digest, _ in known.values()}) > 1:
            before = {tails[process].get(number - 1) for process in known}
            return _described(number, known, None if len(before) > 1 else before.pop())
    return None


def _described(
    number: int, known: Mapping[int, tuple[str, str]], before: tuple[str, str] | None
) -> str:
    entries = sides_of({process: entry for process, (_, entry) in known.items()})
    if number == 1:
        return f"launch 1 differs: {entries}"
    if before is not None:
        return f"launch {number} differs: {entries} (after {before[1]} on all)"
    # They differed already before what is remembered.
    groups: dict[str, list[int]] = {}
    for process, (digest, _) in known.items():
        groups.setdefault(digest, []).append(process)
    apart = " and ".join(name_processes(who) for who in groups.values())
    return f"launches differ at number {number} or before between {apart}: {entries}"

"""The sizes that an engine compiles for: checked, and chosen where nobody has asked for any."""

from __future__ import annotations

from collections.abc import Sequence

_CHUNK = 256
"""Tokens of a whole piece of a prompt, unless somebody asks for other ones."""


def check_sizes(sizes: dict[str, int], max_length: int, shards: int) -> None:
    """Raises ValueError for sizes below 1 and for slots that `shards` does not divide."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if max_length < 2:
        raise ValueError(f"max_length={max_length} must hold a prompt and a token: at least 2")
    if sizes["slots"] % shards:
        raise ValueError(
            f"slots={sizes['slots']} must be divisible by the mesh's batch axes, {shards}"
        )


def make_buckets(
    name: str, asked: Sequence[int], smallest: int, longest: int, max_length: int
) -> tuple[int, ...]:
    """Ascending lengths up to `longest`, by default powers of two from `smallest`; `longest` is the
    last. Raises ValueError for one that is beyond `max_length`."""
    for size in asked:
        if not 1 <= size <= max_length:
            raise ValueError(f"{name}: {size} must lie between 1 and max_length={max_length}")
    powers = [1 << i for i in range(longest.bit_length()) if 1 << i >= smallest]
    return tuple(sorted({*(size for size in asked or powers if size < longest), longest}))


def choose_chunk(chunk: int | None, buckets: Sequence[int], max_length: int) -> int:
    """The tokens of a whole piece: those asked for, or what splits `max_length` evenly into pieces
    of at most 256, or the largest bucket asked for. Raises ValueError if it does not fit."""
    if chunk is None:
        pieces = -(-max_length // _CHUNK)
        # Even pieces, so that rounding the cache up to whole ones costs next to nothing.
        even = min(max_length, -(-max_length // (16 * pieces)) * 16)
        chunk = max([even, *(size for size in buckets if size <= max_length)])
    if not 1 <= chunk <= max_length:
        raise ValueError(f"prefill_chunk={chunk} must lie between 1 and max_length={max_length}")
    return chunk

"""Text in which only some places may hold special tokens.

What a template writes may: `<|im_end|>` there is one token. What a question, a message or a tool
says may not: there it is ten characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl.data.tokenizers import Tokenizer

Piece = tuple[str, bool]
"""Text, and whether special tokens are recognised in it."""


def encode_pieces(
    pieces: Iterable[Piece], tokenizer: Tokenizer, *, continues: bool = False
) -> list[int]:
    """Token ids of the joined pieces; special tokens only where a piece allows them.

    `continues`: other tokens stand before, so that the text is not the beginning of one. Raises
    `DataError` for characters that the tokenizer does not know.
    """
    pieces = _merged(pieces)
    text = "".join(piece for piece, _ in pieces)
    meant = _specials_of(pieces, tokenizer)
    if not meant and not continues:
        return tokenizer.encode(text)
    begins_plain = not meant or meant[0][0] > 0
    alike = not (continues and begins_plain and tokenizer.beginning_matters)
    if alike and meant == _specials_of([(text, True)], tokenizer):
        # No other piece holds what looks like a special token: the tokenizer may do it all.
        ids = tokenizer.encode_with_specials(text)
        if ids is not None and _count(ids, tokenizer) == len(meant):
            return ids
    return _encode_around(text, meant, tokenizer, continues)


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of the same kind as one: a special token may span two pieces of a template."""
    merged: list[Piece] = []
    for text, trusted in pieces:
        if merged and merged[-1][1] == trusted:
            merged[-1] = (merged[-1][0] + text, trusted)
        elif text:
            merged.append((text, trusted))
    return merged


def _specials_of(pieces: Sequence[Piece], tokenizer: Tokenizer) -> list[tuple[int, int, int]]:
    """(start, end, id) of the special tokens in the pieces that may hold them."""
    found, offset = [], 0
    for text, trusted in pieces:
        if trusted and tokenizer.special_tokens:
            for match in tokenizer.special_pattern.finditer(text):
                id_ = tokenizer.special_tokens[match.group()]
                found.append((offset + match.start(), offset + match.end(), id_))
        offset += len(text)
    return found


def _count(ids: list[int], tokenizer: Tokenizer) -> int:
    special = set(tokenizer.special_tokens.values())
    return sum(id_ in special for id_ in ids)


def _encode_around(
    text: str, meant: list[tuple[int, int, int]], tokenizer: Tokenizer, continues: bool
) -> list[int]:
    """Encode what lies between the special tokens piece by piece, as plain text."""
    ids: list[int] = []
    position, strip_left = 0, False
    strips = tokenizer.special_strips
    for start, end, id_ in meant:
        left, right = strips.get(id_, (False, False))
        plain = text[position:start]
        plain = plain.lstrip() if strip_left else plain
        plain = plain.rstrip() if left else plain
        ids += [*_encode_plain(plain, tokenizer, continues or position > 0), id_]
        position, strip_left = end, right
    rest = text[position:]
    rest = rest.lstrip() if strip_left else rest
    return ids + _encode_plain(rest, tokenizer, continues or position > 0)


def _encode_plain(text: str, tokenizer: Tokenizer, continues: bool) -> list[int]:
    """Ids of plain text. Some tokenizers put a space before the first text, and only there."""
    if not text:
        return []
    if continues and tokenizer.beginning_matters:
        before = tokenizer.encode("\n")
        ids = tokenizer.encode("\n" + text)
        if ids[: len(before)] == before:
            return ids[len(before) :]
    return tokenizer.encode(text)

"""Text in which only some places may hold special tokens.

What a template writes may: `<|im_end|>` there is one token. What a question, a message or a tool
says may not: there it is ten characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxrl.errors import DataError

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
        return _encode_plain(text, tokenizer, continues=False)
    begins_plain = not meant or meant[0][0] > 0
    alike = not (continues and begins_plain and tokenizer.beginning_matters)
    if alike and meant == _specials_of([(text, True)], tokenizer):
        # No other piece holds what looks like a special token: the tokenizer may do it all.
        ids = tokenizer.encode_with_specials(text)
        if ids is not None and sum(id_ in tokenizer.special_ids for id_ in ids) == len(meant):
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
    """Ids of plain text. Some tokenizers put a space before the first text, and only there.

    Raises `DataError` if the vocabulary makes a special token of its characters all the same.
    """
    if not text:
        return []
    ids = tokenizer.encode(text)
    if continues and tokenizer.beginning_matters:
        before = tokenizer.encode("\n")
        behind = tokenizer.encode("\n" + text)
        if behind[: len(before)] == before:
            ids = behind[len(before) :]
    for name in {tokenizer.inner.id_to_token(id_) for id_ in tokenizer.special_ids & set(ids)}:
        # The token for unknown words is special, too, and may stand for any text.
        if name in text:
            raise DataError(
                f"tokenizer {tokenizer.name!r} makes the special token {name!r} of plain text, "
                f"here of {text[:40]!r}: the text cannot be told from the token"
            )
    return ids

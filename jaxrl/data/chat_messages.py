"""Conversations as a template gets them: plain values, in which no special token can be read.

A message may hold "<|im_end|>", by accident or to deceive. Before the template runs each such text
becomes one private character, and afterwards the characters again, in a piece of its own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl.data.chat_limits import DEPTH
from jaxrl.data.specials import Piece
from jaxrl.data.tokenizers import Tokenizer
from jaxrl.errors import DataError

_PRIVATE = range(0xF0000, 0xFFFFE)
"""Code points that Unicode leaves to private use."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages hold what the assistant thought; templates read the first two."""

_NAMES = ("role", "type")
"""Keys whose values templates compare with names, and do not quote from strangers."""


class Hidden:
    """Messages, tools and variables with their special tokens hidden, and the way back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ):
        self.messages = _checked_messages(messages)
        self.tools = _checked_tools(tools)
        self.variables = plain_value(dict(variables), "variables")
        given = [self.messages, self.tools, self.variables]
        self._tokenizer = tokenizer
        self._free = _unused_characters([source, *_strings(given)])
        self._characters: dict[str, str] = {}
        if tokenizer.special_tokens:
            self.messages, self.tools, self.variables = (self._hide(value) for value in given)

    @functools.cached_property
    def mark(self) -> str:
        """A character that occurs nowhere else."""
        return next(self._free)

    def restored(self, text: str) -> list[Piece]:
        """The rendered text in pieces; those that were hidden hold no special tokens."""
        if not self._characters:
            return [(text, True)]
        # JSON may have written a character as an escape sequence.
        back = {c: hidden for hidden, c in self._characters.items()}
        back |= {json.dumps(c)[1:-1]: hidden for c, hidden in back.items()}
        parts = re.split(f"({'|'.join(map(re.escape, back))})", text)
        return [(back.get(part, part), i % 2 == 0) for i, part in enumerate(parts) if part]

    def _hide(self, value: Any) -> Any:
        return _map_strings(value, self._hide_text)

    def _hide_text(self, text: str) -> str:
        text = self._tokenizer.special_pattern.sub(lambda m: self._character(m.group()), text)
        # What follows in the rendered text might complete a token that begins at the end.
        for end in {len(text), len(text.rstrip())}:
            for start in range(max(0, end - self._tokenizer.longest_special), end):
                if text[start:end] in self._tokenizer.special_beginnings:
                    text = text[:start] + self._character(text[start]) + text[start + 1 :]
        return text

    def _character(self, text: str) -> str:
        """The character that stands for `text`."""
        if text not in self._characters:
            self._characters[text] = next(self._free)
        return self._characters[text]


def plain_value(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of text, numbers, None, lists, tuples and dicts only: nothing that has methods
    a template might call. Raises `DataError` for anything else; `where` names it."""
    if depth > DEPTH:
        raise DataError(f"{where} is nested deeper than {DEPTH}")
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        if wrong := next((key for key in value if not isinstance(key, str)), None):
            raise DataError(f"{where} has the key {wrong!r}: keys must be text")
        return {
            str.__str__(key): plain_value(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = (plain_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value))
        return tuple(items) if isinstance(value, tuple) else list(items)
    raise DataError(f"{where} holds a {type(value).__name__}: it must be a JSON value")


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plain messages, without keys that hold None and with each thought under both its names."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise DataError(f"messages must be a list of at least one, got {str(messages)[:60]!r}")
    checked = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where} must be a mapping with a role, got {str(message)[:60]!r}")
        kept = {key: value for key, value in message.items() if value is not None}
        thought = next((kept[key] for key in _REASONING if key in kept), None)
        if thought is not None:
            kept = {"thinking": thought, **kept, "reasoning_content": thought}
        checked.append(plain_value(kept, where))
    return checked


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise DataError(f"tools[{index}] must be a JSON schema, got {str(tool)[:60]!r}")
    return plain_value(list(tools), "tools")


def _strings(value: Any) -> Iterator[str]:
    """Every text in a plain value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A plain value with every text changed, except those that are names of the format."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            change(key): item
            if key in _NAMES and isinstance(item, str) and item.isidentifier()
            else _map_strings(item, change)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_map_strings(item, change) for item in value)
    return value


def _unused_characters(texts: Sequence[str]) -> Iterator[str]:
    """Private characters that occur in none of the texts."""
    used: set[str] = set()
    for text in texts:
        if not text.isascii():
            used |= set(text)
    return (chr(code) for code in _PRIVATE if chr(code) not in used)

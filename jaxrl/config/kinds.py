"""The types a config field may have: checking values, reading them from text, naming them.

A kind is bool, int, float, str, a `Literal` of strings, `tuple[int, ...]` (or of str or float),
`dict[str, Any]` (JSON values), or one of these `| None`. Errors carry what the value must be.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

_NAMES = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}
_LONG = 2**63
_SHORT = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", type(None): "none"}


def is_supported(kind: Any) -> bool:
    """Whether a field may have this annotation."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return all(isinstance(choice, str) for choice in args)
    if origin is tuple:
        return len(args) == 2 and args[1] is Ellipsis and args[0] in (int, float, str)
    if origin in (Union, types.UnionType):
        return len(args) == 2 and args[1] is type(None) and is_supported(args[0])
    return kind in _NAMES or origin is dict


def describe(kind: Any) -> str:
    """Short name of a kind for the reference: `int`, `"a" | "b"`, `tuple[int, ...]`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(json.dumps(choice) for choice in args)
    if origin is tuple:
        return f"tuple[{_SHORT[args[0]]}, ...]"
    if origin in (Union, types.UnionType):
        return f"{describe(args[0])} | none"
    return _SHORT[origin or kind]


def coerce(kind: Any, value: Any) -> Any:
    """Value -> the value to store (an int becomes a float, a list a tuple). Raises `ValueError`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value not in args or not isinstance(value, str):
            raise ValueError(_choice(value, args))
        return value
    if origin is tuple:
        if not isinstance(value, tuple | list):
            raise ValueError(f"a tuple, each element {_NAMES[args[0]]}")
        return tuple(coerce(args[0], element) for element in value)
    if origin is dict:
        return _json_value(value, top=True)
    if origin in (Union, types.UnionType):
        return None if value is None else coerce(args[0], value)
    return _scalar(kind, value)


def _scalar(kind: type, value: Any) -> Any:
    """bool is not an int here; an int is accepted for a float; NaN and infinities are not."""
    if getattr(value, "shape", None) == ():
        value = value.item()  # a number of numpy or jax becomes a plain Python one
    if kind is float and type(value) is int:
        value = _to_float(value)
    fits = isinstance(value, kind) and not (kind is not bool and isinstance(value, bool))
    if not fits or (kind is float and not math.isfinite(value)):
        raise ValueError(_NAMES[kind])
    if kind is int and not -_LONG <= value < _LONG:
        raise ValueError(f"{_NAMES[int]} of at most 64 bits")
    return kind(value)


def _to_float(value: int) -> float:
    """Infinity where an integer is larger than any float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _json_value(value: Any, *, top: bool = False) -> Any:
    """A deep copy in plain JSON types, so that the frozen record owns it and it round-trips."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _json_value(element) for key, element in value.items()}
    if not top and isinstance(value, list | tuple):
        return [_json_value(element) for element in value]
    plain = value is None or isinstance(value, str | bool | int | float)
    number = isinstance(value, int | float)
    if top or not plain or (number and not math.isfinite(_to_float(value))):
        raise ValueError("a mapping from names to JSON values (finite numbers, text, lists, …)")
    return value


def parse(kind: Any, text: str) -> Any:
    """Text of a command-line flag -> value of the kind. Raises `ValueError`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if text.lower() == "none" else parse(args[0], text)
    if origin is tuple:
        value = _literal(text) if text.strip() else ()
        # "8,16" is a tuple already; a single element may stand without its comma, and words without
        # their quotes.
        if isinstance(value, str) and args[0] is str:
            value = tuple(word.strip() for word in value.split(","))
        return coerce(kind, value if isinstance(value, tuple | list) else (value,))
    if origin is dict:
        return coerce(kind, _literal(text))
    if kind is bool:
        return _parse_bool(text)
    if kind in (int, float):
        return coerce(kind, _number(kind, text))
    return coerce(kind, text)


def _number(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(_NAMES[kind]) from None


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered not in ("true", "false", "1", "0"):
        raise ValueError("true or false")
    return lowered in ("true", "1")


def _literal(text: str) -> Any:
    """JSON, else a Python literal, else the text itself (for one-element tuples of text)."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


def _choice(value: Any, choices: Iterable[str]) -> str:
    options = ", ".join(repr(choice) for choice in choices)
    return f"one of {options}" + did_you_mean(value, choices, quote=repr)


def did_you_mean(
    name: Any, known: Iterable[str], *, prefix: str = "", quote: Callable[[str], str] = str
) -> str:
    """ "; did you mean x?" if a known name is close to `name`, else ""."""
    close = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {quote(prefix + close[0])}?" if close else ""

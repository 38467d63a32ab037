"""Reads the fields of a JSON request: right types and ranges, no field that nobody knows."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl.config import kinds
from jaxrl.serving.errors import FieldError


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises `FieldError` for anything else."""
    try:
        # Text first: `json.loads` would also take UTF-16.
        body = json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object
        )
    except UnicodeDecodeError as error:
        raise FieldError(f"the body is not UTF-8: {error}") from None
    except RecursionError:
        raise FieldError("the body is nested too deeply") from None
    except ValueError as error:
        raise FieldError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise FieldError(f"the body must be a JSON object, not {_type(body)}")
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a field given twice would otherwise count as its last value, in silence."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the field {twice[:80]!r} is given twice")
    return found


class Fields:
    """The fields of an object, each taken once; null means that the field is not there."""

    def __init__(self, body: dict[str, Any], where: str = ""):
        self._body, self._where = body, where
        self._taken: set[str] = set()

    def name(self, field: str) -> str:
        """The field as a client finds it: "stream_options.include_usage"."""
        return f"{self._where}.{field}" if self._where else field

    def take(self, field: str) -> Any:
        """The value, unchecked; None if it is not there."""
        self._taken.add(field)
        return self._body.get(field)

    def boolean(self, field: str, default: bool = False) -> bool:
        """true or false."""
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(field, value, "true or false")
        return value

    def integer(self, field: str, default: int | None, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`."""
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(field, value, "a whole number")
        return self._within(field, value, low, high)

    def number(self, field: str, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(field, value, "a number")
        return float(self._within(field, value, low, high))

    def text(self, field: str, default: str = "") -> str:
        """A text."""
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(field, value, "a text")
        return value

    def only(self, field: str, allowed: Sequence[Any], why: str) -> None:
        """A field that exists elsewhere, and here only with values that change nothing."""
        value = self.take(field)
        # The types, too: for Python true is 1.
        same = any(value == other and type(value) is type(other) for other in allowed)
        if value is not None and not same:
            raise self.error(field, f"{_shown(value)} is not supported: {why}")

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Every field has been read, or may be ignored. Raises `FieldError` naming the first that
        is neither."""
        known = self._taken.union(ignored)
        for field in self._body:
            if field not in known:
                name = self.name(field[:80])
                hint = kinds.did_you_mean(field[:80], known)
                raise FieldError(f"unknown field {name!r}{hint}", name, "unknown_field")

    def error(self, field: str, rule: str) -> FieldError:
        """The error of a field: its name, then what is wrong."""
        return FieldError(f"{self.name(field)}={rule}", self.name(field))

    def _within(self, field: str, value: Any, low: Any, high: Any) -> Any:
        if (isinstance(value, float) and not math.isfinite(value)) or not low <= value <= high:
            raise self.error(field, f"{_shown(value)} must be from {low} to {high}")
        return value

    def _wrong(self, field: str, value: Any, wanted: str) -> FieldError:
        return self.error(field, f"{_shown(value)} must be {wanted}, not {_type(value)}")


def _shown(value: Any) -> str:
    """A value in a message: short, whatever a client sends."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _type(value: Any) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")

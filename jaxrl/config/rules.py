"""Constraints of single fields: what the value must be, as words and as a test."""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """`text` completes "must be …" in messages and in the reference; `holds` tests a value."""

    text: str
    holds: Callable[[Any], bool]


def at_least(low: float, note: str = "") -> Rule:
    """low <= value; `note` explains a special value, for example "0: no limit"."""
    return Rule(f"at least {low}" + (f" ({note})" if note else ""), lambda value: value >= low)


def above(low: float) -> Rule:
    """low < value."""
    return Rule(f"above {low}", lambda value: value > low)


def seconds() -> Rule:
    """A time limit that clocks can add to: above 0, at most 3 years."""
    return Rule("above 0 and at most 100000000", lambda value: 0 < value <= 1e8)


def steps(note: str) -> Rule:
    """A number of updates; the step is counted on the device in 32 bits."""
    return Rule(f"between 0 and 2147483647 ({note})", lambda value: 0 <= value < 2**31)


def within(low: float, high: float, note: str = "") -> Rule:
    """low <= value <= high; `note` explains a special value."""
    text = f"between {low} and {high}" + (f" ({note})" if note else "")
    return Rule(text, lambda value: low <= value <= high)


def below_one() -> Rule:
    """0 <= value < 1, for decay rates."""
    return Rule("at least 0 and below 1", lambda value: 0 <= value < 1)


def axis_size() -> Rule:
    """A mesh axis: a positive count, or -1 for whatever is left of the devices."""
    return Rule("at least 1, or -1 (what the other axes leave)", lambda v: v >= 1 or v == -1)


def non_empty() -> Rule:
    """Text with something in it."""
    return Rule("non-empty", lambda value: bool(value.strip()))


def increasing() -> Rule:
    """A tuple of positive integers, each larger than the one before; empty is allowed."""
    return Rule(
        "increasing positive integers, or () for the default",
        lambda v: all(b > a for a, b in zip((0, *v), v, strict=False)),
    )


def http_addresses() -> Rule:
    """A tuple of addresses of servers, each once; empty is allowed."""
    pattern = r"https?://([\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}"
    return Rule(
        "addresses such as http://10.0.0.2:8000, with http or https and a port, each at most once",
        lambda value: (
            len(set(value)) == len(value) and all(re.fullmatch(pattern, one) for one in value)
        ),
    )


def among(names: Sequence[str]) -> Rule:
    """A tuple of some of `names`, each once."""
    return Rule(
        f"of {', '.join(names)}, each at most once",
        lambda value: set(value) <= set(names) and len(set(value)) == len(value),
    )


def scorer_name() -> Rule:
    """The name of a scorer that jaxrl brings, or where to import one of the user's."""
    return Rule(
        "the name of a scorer, or module:function",
        lambda value: re.fullmatch(r"\w+|\w+(\.\w+)*:\w+", value) is not None,
    )


def template() -> Rule:
    """A `str.format` template with at least one named field. Which names exist, only data knows."""
    return Rule(
        "a format string with at least one field such as {question}, all of them named "
        "({{ and }} stand for braces)",
        lambda value: bool(fields := _template_fields(value)) and all(fields),
    )


def _template_fields(text: str) -> set[str]:
    """Names of the fields of a format string: "" for a positional one; empty if it is malformed."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError:
        return set()
    return {"" if re.match(r"\d*($|[.\[])", name) else name for name in names}

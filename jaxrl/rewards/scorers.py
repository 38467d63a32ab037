"""Scorers: pure functions (completion, reference) -> float, and how they are found by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from jaxrl.errors import ConfigError
from jaxrl.rewards.symbolic import symbolic
from jaxrl.types import Completion

Scorer = Callable[[Completion, Mapping[str, Any]], float]
"""A reward function: the completion and the prompt's reference -> a finite number.

An object may be one too. Its reward process then calls `prepare()` once before the first item, and
may from there on grow by `memory_bytes` at most, if it has them.
"""

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
# Not behind a letter, digit or point: "x3" holds no number, and the last one of "5-2" is 2.
_NUMBER = re.compile(rf"(?<![\w.])([-+]?)[$€£]?({_DECIMAL})(?:\s*/\s*({_DIGITS}))?")
_LONGEST_NUMBER = 1000


def exact(completion: Completion, reference: Mapping[str, Any]) -> float:
    """1.0 if the text is `reference["answer"]`, apart from white space at both ends; else 0.0."""
    return float(completion.text.strip() == str(reference["answer"]).strip())


def numeric(completion: Completion, reference: Mapping[str, Any]) -> float:
    """1.0 if the whole text is a number equal to `reference["answer"]`, else 0.0.

    Numbers are compared exactly, as fractions: 1,000 = 1000.0 = 1e3, 1/2 = 0.5, -0 = 0.
    Raises ValueError if the reference is not a number.
    """
    return float(parse_number(completion.text) == _gold(reference))


def last_number(completion: Completion, reference: Mapping[str, Any]) -> float:
    """1.0 if the last number in the text equals `reference["answer"]`, else 0.0.

    For models that think aloud before they answer. Raises ValueError as `numeric` does.
    """
    gold = _gold(reference)  # also where the text has no number: a wrong reference never scores 0
    found = list(_NUMBER.finditer(_plain_signs(completion.text)))
    return float(bool(found) and _value(found[-1]) == gold)


def parse_number(text: str) -> Fraction | None:
    """The number that the whole text is, or None. Text is never evaluated.

    Accepts a sign, a currency sign, thousands separators, a decimal point, an exponent of up to
    three digits, and a denominator. Numbers of more than 1000 characters are None.
    """
    match = _NUMBER.fullmatch(_plain_signs(text).strip())
    return _value(match) if match else None


SCORERS: dict[str, Scorer] = {
    "exact": exact,
    "numeric": numeric,
    "last_number": last_number,
    "symbolic": symbolic,
}
"""The scorers that need no module path."""


def load_scorer(name: str) -> Scorer:
    """The scorer called `name`: a key of `SCORERS`, or "package.module:function".

    Raises `ConfigError` that says what is wrong with the name, the module or the function, or which
    package is not installed.
    """
    if name == "symbolic":
        symbolic.check()
    if name in SCORERS:
        return SCORERS[name]
    module_name, separator, path = name.partition(":")
    if not (separator and module_name and path):
        close = difflib.get_close_matches(name, SCORERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"scorer={name!r} must be one of {', '.join(SCORERS)}, "
            f"or 'package.module:function'{hint}"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"scorer={name!r}: module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"scorer={name!r}: {module_name} has no {path!r}{hint}")
        found = getattr(found, part)
    check_scorer(found, f"scorer={name!r}")
    return found


def check_scorer(scorer: Any, name: str) -> None:
    """Raise `ConfigError` unless `scorer` can be called as scorer(completion, reference)."""
    if not callable(scorer) or inspect.isclass(scorer):
        raise ConfigError(f"{name} must be a function, got {type(scorer).__name__} {scorer!r:.80}")
    if inspect.iscoroutinefunction(scorer):
        raise ConfigError(f"{name} is async; a scorer is a plain function that may block")
    try:
        signature = inspect.signature(scorer)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{name} must be callable as scorer(completion, reference), but has the signature "
            f"{signature}: {error}"
        ) from None


def _gold(reference: Mapping[str, Any]) -> Fraction:
    answer = str(reference["answer"])
    number = parse_number(answer)
    if number is None:
        raise ValueError(f"the reference answer {answer!r:.80} is not a number")
    return number


def _plain_signs(text: str) -> str:
    """Typographic minus signs as the ASCII one."""
    return text.replace("\u2212", "-")


def _value(match: re.Match[str]) -> Fraction | None:
    sign, numerator, denominator = match.groups()
    if len(match.group()) > _LONGEST_NUMBER:
        return None
    value = Fraction(numerator.replace(",", ""))
    if denominator is not None:
        divisor = Fraction(denominator.replace(",", ""))
        if divisor == 0:
            return None
        value /= divisor
    return -value if sign == "-" else value

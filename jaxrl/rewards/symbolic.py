"""The scorer `symbolic`: mathematical equality, by math-verify and sympy.

sympy has no limits of its own: a tower of powers keeps it busy for ever. The limits of math-verify
are alarms inside the process, which a loop in C does not notice. They are switched off here, and
the pool's limit, which kills the process, counts instead.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from jaxrl.errors import ConfigError
from jaxrl.types import Completion

_BOX = "\\boxed{"
_TAIL = 2000
"""Characters at the end of a text in which an answer without a box is looked for."""

_SCIENTIFIC = re.compile(r"(?<![\w.\\])(?:\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.]*\w)")
"""A number with an exponent."""

_LONGEST = 400
"""Characters of a formula; the time to parse one grows with the square of its length and more."""


class Symbolic:
    """1.0 if the answer in the text is equal to `reference["answer"]`, as mathematics; else 0.0.

    The answer is what stands in the last `\\boxed{…}`; in a text without one, what math-verify
    finds at its end, or the whole text if that is a single formula. Reference answers are LaTeX
    without dollar signs, as in MATH, or plain numbers. Whatever is wrong with the text scores 0;
    a reference that cannot be read raises ValueError.
    """

    memory_bytes = 2 << 30
    """How far its process may grow: a number of a thousand million digits fits in no machine."""

    def __reduce__(self) -> str:
        return "symbolic"  # by name, as functions are pickled

    def check(self) -> None:
        """Raise `ConfigError` unless the package is installed. Does not import it."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "scorer='symbolic' needs the package math-verify: pip install 'jaxrl[math]'"
            )

    def prepare(self) -> None:
        """Import the package: once in each reward process, before its first item."""
        self.check()
        # It warns of its alarms being off; the pool watches the time.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        importlib.import_module("math_verify")

    def __call__(self, completion: Completion, reference: Mapping[str, Any]) -> float:
        gold = _gold(str(reference["answer"]))
        return float(any(_equal(gold, found) for found in _candidates(completion.text)))


symbolic = Symbolic()
"""The scorer itself, as `rewards.scorer="symbolic"` names it."""


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` whose braces close, or None."""
    end = len(text)
    while (start := text.rfind(_BOX, 0, end)) >= 0:
        depth = 1
        for place in range(start + len(_BOX), len(text)):
            escaped = text[place - 1] == "\\"
            depth += {"{": 1, "}": -1}.get(text[place], 0) if not escaped else 0
            if depth == 0:
                return text[start + len(_BOX) : place]
        end = start
        if len(text) - start > 2 * _TAIL:  # boxes that never close: looking at all takes for ever
            return None
    return None


def _candidates(text: str) -> Iterator[list[Any]]:
    """What may be the answer of a completion, parsed, the likeliest first."""
    boxed = last_boxed(text)
    if boxed is not None:
        if len(boxed) <= _LONGEST:
            yield _parse(f"${boxed}$")
        return
    tail = text[-_TAIL:].strip()
    yield _parse(tail)
    if 0 < len(tail) <= _LONGEST and "$" not in tail and "\n" not in tail:
        yield _parse(f"${tail}$")


@functools.lru_cache(maxsize=256)
def _gold(answer: str) -> list[Any]:
    # Bare, more than a fifth of the answers in MATH are misread; as a formula they are not.
    parsed = _parse(f"${answer.strip().strip('$')}$")
    if all(isinstance(part, str) for part in parsed):
        raise ValueError(f"the reference answer {answer!r:.80} cannot be read as mathematics")
    return parsed


def _parse(text: str) -> list[Any]:
    """Expressions and the text they came from; [] if there are none."""
    from math_verify import parse

    return parse(_SCIENTIFIC.sub(_written_out, text), parsing_timeout=None)


def _written_out(match: re.Match[str]) -> str:
    """3e8 as 300000000: the package would take the e for Euler's number, or stop before it."""
    # Nobody's answer is longer; what is left out can equal nothing.
    return f"{Decimal(match.group()):f}" if len(match.group(1)) <= 3 else ""


def _equal(gold: list[Any], found: list[Any]) -> bool:
    from math_verify import verify

    return bool(found) and verify(gold, found, timeout_seconds=None)

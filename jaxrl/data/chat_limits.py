"""What a chat template may cost: a budget for one rendering, in units of about one character.

A template comes from a stranger. Nothing in it can write to disk or reach Python, but it could ask
for a loop that never ends or a string that fills the memory. Everything it does is paid from a
`Budget`, before the work is done where the result could be large.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

STEP, CALL = 64, 256
"""Units of one iteration, filter or operator, and of one call."""

NODE = 16
"""Units of one value inside a list, tuple or mapping."""

TOTAL, LARGEST = 2**24, 2**22
"""Units of one rendering, and of any single value in it; conversations add their own size."""

INT_BITS = 4096
DEPTH = 64
"""How deep calls, and lists in lists, may be nested."""

_CONTAINERS = (list, tuple, set, frozenset, dict, KeysView, ValuesView, ItemsView)


class TooMuch(Exception):
    """A limit was passed. Not a `ValueError`: filters must not take it for a bad number."""


class Budget:
    """What one rendering may still use. `size` is that of the conversation, in units."""

    def __init__(self, size: int = 0):
        self.left = TOTAL + 64 * size
        self.largest = LARGEST + 4 * size
        self.output = 4 * self.largest
        self.depth = 0
        # Values of a template never change, so each container is measured once. The reference
        # keeps it alive: otherwise another one might get its id.
        self._known: dict[int, tuple[Any, int, int]] = {}

    def spend(self, units: int) -> None:
        """Pay for work. Raises `TooMuch`."""
        self.left -= units
        if self.left < 0:
            raise TooMuch("it takes more than a rendering may: does a loop in it ever end?")

    def write(self, characters: int) -> None:
        """Pay for output, also that of a macro or a block. Raises `TooMuch`."""
        self.output -= characters
        if self.output < 0:
            raise TooMuch(f"it writes more than {4 * self.largest} characters")

    def allow(self, size: int) -> None:
        """Raise `TooMuch` if a value of `size` units must not be made."""
        if size > self.largest:
            raise TooMuch(f"it makes a value of {size} characters, more than {self.largest}")

    def size(self, value: Any) -> int:
        """Units of a value as text: about its characters, and more for what is in containers."""
        return self._measure(value)[0]

    def depth_of(self, value: Any) -> int:
        """Number of containers around the innermost value."""
        return self._measure(value)[1]

    def hold(self, value: Any) -> Any:
        """`value`, which a template has just made. Raises `TooMuch` if it is too large."""
        if isinstance(value, str):
            self.allow(len(value))
        elif type(value) is int:
            if value.bit_length() > INT_BITS:
                raise TooMuch(f"it makes an integer of {value.bit_length()} bits")
        elif isinstance(value, _CONTAINERS):
            self.allow(self.size(value))
        return value

    def _measure(self, value: Any) -> tuple[int, int]:
        if isinstance(value, str):
            return len(value), 0
        if not isinstance(value, _CONTAINERS):
            return (value.bit_length() // 3 + 1 if isinstance(value, int) else NODE), 0
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = (value, *self._measure_children(value))
        return known[1:]

    def _measure_children(self, value: Any) -> tuple[int, int]:
        total = depth = 0
        children: Iterable[Any] = value
        if isinstance(value, Mapping):
            children = [*value.keys(), *value.values()]
        for child in children:
            self.spend(NODE)
            size, below = self._measure(child)
            total, depth = total + NODE + size, max(depth, below)
        if depth >= DEPTH:
            raise TooMuch(f"it nests values deeper than {DEPTH}")
        return total + NODE, depth + 1


def size_of(value: Any) -> int:
    """Units of a plain value that is not a template's but the user's, and may have any size."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(2 * NODE + size_of(key) + size_of(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(NODE + size_of(item) for item in value)
    return NODE


_BUDGET: ContextVar[Budget] = ContextVar("budget of the chat template that is being rendered")


def budget() -> Budget:
    """The budget of the rendering that this thread is in."""
    return _BUDGET.get()


class spending:
    """`with spending(Budget(…)):` what templates do inside is paid from it."""

    def __init__(self, one: Budget):
        self._one = one

    def __enter__(self) -> Budget:
        self._token = _BUDGET.set(self._one)
        return self._one

    def __exit__(self, *exc: object) -> None:
        _BUDGET.reset(self._token)


def product_size(left: Any, right: Any) -> int:
    """Units of left * right, before it is computed."""
    for many, count in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(count, int):
            return budget().size(many) * max(count, 0)
    return 0


def check_numbers(operator: str, left: Any, right: Any) -> None:
    """Raise `TooMuch` for integers that would get too long."""
    if not (isinstance(left, int) and isinstance(right, int)):
        return
    bits = {
        "*": left.bit_length() + right.bit_length(),
        "**": left.bit_length() * max(right, 0),
    }.get(operator, 0)
    if bits > 2 * INT_BITS:
        raise TooMuch(f"it makes an integer of about {bits} bits")


# Keys of % are in parentheses, which may be nested: what follows any ")" counts as a width.
_WIDE_PERCENT = re.compile(r"[%)][-#0 +]*(\*|\d{4}|\d*\.(\*|\d{4}))")


def percent_size(text: str, values: Any) -> int:
    """Units that text % values takes at most. Raises `TooMuch` for widths above 999."""
    if _WIDE_PERCENT.search(text):
        raise TooMuch(f"it formats with a width that is not below 1000: {text[:40]!r}")
    return len(text) + text.count("%") * (999 + budget().size(values))


def fields_size(text: str, args: Any, kwargs: Any) -> int:
    """Units that text.format(…) takes at most, once every width is below 1000."""
    sizes = budget().size(args) + budget().size(kwargs)
    return len(text) + text.count("{") * (999 + sizes)


def check_width(spec: str) -> None:
    """Raise `TooMuch` for a format specification with a number above 999."""
    if re.search(r"\d{4}", spec):
        raise TooMuch(f"it formats with a width that is not below 1000: {spec[:40]!r}")

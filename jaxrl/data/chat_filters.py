"""Filters, tests and methods that chat templates may use, and what each costs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import defaults, pass_eval_context, runtime

from jaxrl.data.chat_limits import (
    NODE,
    STEP,
    TooMuch,
    budget,
    check_numbers,
    percent_size,
    product_size,
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


STR_METHODS = _words(
    "capitalize casefold center count endswith find format format_map index isalnum isalpha "
    "isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper "
    "join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust "
    "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
)

_CHEAP_FILTERS = _words("abs count d default first float int items last length list")
"""Filters whose time does not depend on how much is in their argument, or whose result pays."""

_FILTERS = _CHEAP_FILTERS | _words(
    "batch capitalize center dictsort e escape forceescape format groupby indent join lower map "
    "max min reject rejectattr replace reverse round safe select selectattr slice sort string sum "
    "title trim truncate unique upper urlencode wordcount"
)
"""All of jinja's that there are. Left out: `random` (a prompt must be the same each time), and
attr, filesizeformat, pprint, striptags, urlize, wordwrap and xmlattr, which no chat needs."""

_CHEAP_TESTS = _words(
    "boolean callable defined divisibleby even false filter float integer iterable mapping none "
    "number odd sameas sequence string test true undefined"
)

MOST = 1_000_000
"""Largest whole number that filters and methods of strings take: a width, a count."""


def filters() -> dict[str, Callable[..., Any]]:
    """Name -> filter that pays for itself."""
    own = {
        "format": _format,
        "indent": _indent,
        "join": _join,
        "replace": _replace,
        "round": _round,
        "sum": _sum,
        "trim": _trim,
    }
    known = {**defaults.DEFAULT_FILTERS, **own}
    paying = {n: _metered(known[n], cheap=n in _CHEAP_FILTERS) for n in sorted(_FILTERS)}
    return {**paying, "tojson": _metered(_tojson, cheap=False)}


def tests() -> dict[str, Callable[..., Any]]:
    """Name -> test that pays for itself."""
    return {
        name: _metered(test, cheap=name in _CHEAP_TESTS)
        for name, test in defaults.DEFAULT_TESTS.items()
        if name != "escaped"
    }


def _metered(function: Callable[..., Any], *, cheap: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        own = budget()
        own.spend(STEP)
        if not cheap:
            pay_arguments(args, kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            return _steps(result)
        if cheap:
            return own.hold(result)
        own.spend(len(result) if isinstance(result, str) else 0)
        return own.hold(result)

    return paid


def _steps(values: Iterator[Any]) -> Iterator[Any]:
    """The values of a filter that works while it is read."""
    for value in values:
        budget().spend(STEP)
        yield budget().hold(value)


def pay_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pay for reading all of the arguments. Raises `TooMuch`."""
    own = budget()
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MOST:
            raise TooMuch(f"it asks for {value}, more than {MOST}")
        own.spend(own.size(value))


def pay_comparison(name: str, left: Any, right: Any) -> None:
    """Pay for `left == right`, `left in right`, …"""
    own = budget()
    sizes = own.size(left), own.size(right)
    if name not in ("in", "notin"):
        own.spend(STEP + min(sizes))
    elif isinstance(right, dict):
        own.spend(STEP + sizes[0])
    else:
        own.spend(STEP + (sizes[1] if isinstance(right, str) else NODE * _count(right)))
        # Each item is compared with what is looked for.
        own.spend(0 if isinstance(right, str) else min(sizes[0] * _count(right), sizes[1]))


def _count(group: Any) -> int:
    return len(group) if hasattr(group, "__len__") else 1


def pay_operator(operator: str, left: Any, right: Any) -> None:
    """Pay for an operator and refuse a result that would be too large."""
    own = budget()
    own.spend(STEP)
    check_numbers(operator, left, right)
    size = 0
    if operator == "*":
        size = product_size(left, right)
    elif operator == "%" and isinstance(left, str):
        size = percent_size(left, right)
    elif operator == "+" and not isinstance(left, int | float):
        size = own.size(left) + own.size(right)
    own.allow(size)
    own.spend(size)


def pay_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pay for a call: methods read their object, macros keep what they have no name for."""
    own, target = budget(), getattr(function, "__self__", None)
    # Inside loops and blocks jinja adds arguments of its own.
    kwargs = {name: value for name, value in kwargs.items() if not name.startswith("_")}
    if isinstance(target, str):
        own.spend(len(target))
        pay_arguments(args, kwargs)
        _check_method(target, function.__name__, args, kwargs)
    elif isinstance(target, list | tuple | range):
        own.spend(NODE * len(target) + (0 if isinstance(target, range) else own.size(target)))
    elif isinstance(target, dict):
        own.spend(sum(own.size(arg) for arg in args))
    elif isinstance(function, runtime.Macro) or isinstance(target, runtime.LoopContext):
        own.hold(args)
        own.hold(kwargs)


def listed(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call; what `join` joins as a list, which can be measured."""
    joins = isinstance(getattr(function, "__self__", None), str) and function.__name__ == "join"
    if not joins or len(args) != 1 or isinstance(args[0], list | tuple | str):
        return args
    return (budget().hold(list(args[0])),)


def _check_method(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Methods of strings whose time or result is more than the sum of their arguments."""
    own = budget()
    if kwargs and name not in ("format", "split", "rsplit", "splitlines"):
        raise TooMuch(f"it calls {name} with names of arguments")
    first = args[0] if args else ""
    if name == "join":
        own.allow(own.size(first) + len(text) * len(first))
    elif name == "replace" and len(args) > 1 and all(isinstance(a, str) for a in args[:2]):
        _allow_replace(text, *args[:2])
    elif name in ("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"):
        _pay_search(text, first)


def _allow_replace(text: str, old: str, new: str) -> None:
    budget().allow(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _pay_search(text: str, wanted: Any) -> None:
    """Each place of `text` may be compared with all of `wanted`."""
    budget().spend(len(text) * len(wanted) // 8 if isinstance(wanted, str) else 0)


@pass_eval_context
def _join(context: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    own, values = budget(), list(value)
    size = own.size(values) + own.size(d) * len(values)
    own.allow(size)
    own.spend(size)
    return defaults.DEFAULT_FILTERS["join"](context, values, d, attribute)


@pass_eval_context
def _replace(context: Any, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    _allow_replace(str(s), str(old), str(new))
    return defaults.DEFAULT_FILTERS["replace"](context, s, old, new, count)


def _indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    text = s if isinstance(s, str) else str(s)
    length = len(width) if isinstance(width, str) else width
    budget().allow(len(text) + (len(text.splitlines()) + 1) * length)
    return defaults.DEFAULT_FILTERS["indent"](s, width, first, blank)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    budget().allow(percent_size(str(value), kwargs or args))
    return defaults.DEFAULT_FILTERS["format"](value, *args, **kwargs)


def _trim(value: Any, chars: str | None = None) -> str:
    _pay_search(str(value), chars)
    return defaults.DEFAULT_FILTERS["trim"](value, chars)


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 300:
        raise TooMuch(f"it rounds to {precision} digits")
    return defaults.DEFAULT_FILTERS["round"](value, precision, method)


def _sum(iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Sum of numbers only: adding up lists copies them again and again."""
    if attribute is not None:
        raise TooMuch("it sums an attribute; use |map(attribute=…)|sum")
    values = list(iterable)
    if not all(isinstance(value, int | float) for value in [start, *values]):
        raise TooMuch("it sums what is not a number")
    return sum(values, start)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no HTML escapes, and letters of all languages as they are."""
    own = budget()
    step = len(indent) if isinstance(indent, str) else max(indent or 0, 0)
    each = step * own.depth_of(x) + own.size(list(separators or ()))
    own.allow(own.size(x) * (1 + each // NODE) + each)
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

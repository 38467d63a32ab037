"""The jinja environment in which chat templates run: like transformers' own, but with a budget.

Only the methods, filters and tests that are listed here exist for a template. Those whose result
could be much larger than their arguments are measured before they run.
"""

from __future__ import annotations

import datetime
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import pass_context, runtime, sandbox
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.utils import Cycler, Joiner, Namespace

from jaxrl.data import chat_filters, chat_limits
from jaxrl.data.chat_limits import STEP, Budget, TooMuch, budget, spending
from jaxrl.data.chat_syntax import GenerationExtension, metered
from jaxrl.errors import DataError

LONGEST_SOURCE = 2**17
"""Characters of a template; the longest published ones have about 20 000."""

LONGEST_MESSAGE = 500
"""Characters that are shown of what a template says when it fails."""

_METHODS: tuple[tuple[Any, frozenset[str]], ...] = (
    (str, chat_filters.STR_METHODS),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    ((list, tuple), frozenset({"copy", "count", "index", "grouper", "list"})),
    (range, frozenset({"count", "index", "start", "step", "stop"})),
    (Cycler, frozenset({"current", "next", "reset"})),
)
"""Type -> the attributes that templates may use."""

_OPEN = (
    Namespace,
    runtime.LoopContext,
    runtime.Macro,
    runtime.BlockReference,
    runtime.TemplateReference,
)
"""What jinja itself hands to templates: every attribute without an underscore is harmless."""

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda item, group: item in group,
    "notin": lambda item, group: item not in group,
}


class _Namespace(Namespace):
    """A namespace whose text does not show what is in it: that may be another namespace."""

    def __repr__(self) -> str:
        return "<Namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)


class _Formatter(sandbox.SandboxedFormatter):
    """`str.format` with fields below 1000 characters of padding."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        chat_limits.check_width(format_spec)
        return super().format_field(value, format_spec)


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationExtension, "jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=_finalize,
        )
        self.filters = chat_filters.filters()
        self.tests = chat_filters.tests()
        self.globals = {
            "range": sandbox.safe_range,
            "dict": _make_dict,
            "namespace": _Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    # What the rewritten syntax calls.

    def step(self) -> bool:
        """One iteration of a loop."""
        budget().spend(STEP)
        return True

    def written(self, characters: int) -> None:
        """Text between tags was written."""
        budget().spend(characters)
        budget().write(characters)

    def hold(self, value: Any) -> Any:
        """A list, tuple or dict was written down."""
        if isinstance(value, dict) and any(isinstance(key, tuple) for key in value):
            raise TooMuch("it uses a tuple as the key of a mapping")
        budget().spend(STEP)
        return budget().hold(value)

    def touched(self, value: Any) -> Any:
        """A value is compared."""
        budget().spend(STEP + budget().size(value))
        return value

    def compare(self, name: str, left: Any, right: Any) -> Any:
        """`left == right` and so on."""
        chat_filters.pay_comparison(name, left, right)
        return _COMPARISONS[name](left, right)

    def joined(self, *parts: Any) -> str:
        """`a ~ b ~ c`."""
        size = sum(map(budget().size, parts))
        budget().allow(size)
        budget().spend(STEP + size)
        return budget().hold("".join(map(str, parts)))

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`value[start:stop:step]`."""
        budget().spend(STEP)
        part = value[start:stop:step]
        budget().spend(len(part) if isinstance(part, str) else 0)
        return budget().hold(part)

    # What jinja lets an environment decide.

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use `obj.attr`: it stands in a list, or is jinja's own."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        for kind, names in _METHODS:
            if isinstance(obj, kind):
                return attr in names
        return isinstance(obj, _OPEN)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Raise instead of letting the template go on with an undefined value."""
        raise SecurityError(f"it must not use {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `format_map` under the rules of the sandbox, and bounded."""
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"

        def bounded(*args: Any, **kwargs: Any) -> str:
            if is_map:
                (kwargs,), args = args, ()
            size = chat_limits.fields_size(text, args, kwargs)
            budget().allow(size)
            budget().spend(size)
            return type(text)(_Formatter(self).vformat(text, args, kwargs))

        return bounded

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`."""
        if isinstance(argument, tuple):
            raise TooMuch("it uses a tuple as the key of a mapping")
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, measured before and after."""
        chat_filters.pay_operator(operator, left, right)
        return budget().hold(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template."""
        if getattr(__obj, "__self__", None) is __self:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        own = budget()
        own.spend(chat_limits.CALL + chat_limits.NODE * (len(args) + len(kwargs)))
        args = chat_filters.listed(__obj, args)
        chat_filters.pay_call(__obj, args, kwargs)
        own.depth += 1
        if own.depth > chat_limits.DEPTH:
            raise TooMuch(f"its calls are nested deeper than {chat_limits.DEPTH}")
        try:
            result = own.hold(super().call(__context, __obj, *args, **kwargs))
        finally:
            own.depth -= 1
        own.spend(len(result) if isinstance(result, str) else 0)
        return result


@pass_context
def _finalize(context: Any, value: Any) -> Any:
    """What `{{ value }}` writes."""
    own = budget()
    if not isinstance(value, str):
        size = own.size(value)
        own.allow(size)
        own.spend(STEP + size)
        value = str(value)
    own.spend(STEP + len(value))
    own.write(len(value))
    return value


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return budget().hold(dict(*args, **kwargs))


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 100:
        raise TooMuch("its time format is longer than 100 characters")
    return datetime.datetime.now().strftime(format)


@functools.cache
def _environment() -> _Environment:
    return _Environment()


@functools.lru_cache(maxsize=64)
def compile_template(source: str, name: str) -> jinja2.Template:
    """The template ready to run. Raises `DataError` that names the file and the line."""
    if len(source) > LONGEST_SOURCE:
        raise DataError(
            f"{name}: the chat template has {len(source)} characters, more than {LONGEST_SOURCE}"
        )
    environment = _environment()
    try:
        with spending(Budget()):
            tree = metered(environment.parse(source))
            code = environment.compile(tree, "chat template", "chat template")
        return jinja2.Template.from_code(environment, code, environment.make_globals(None))
    except TemplateSyntaxError as error:
        raise DataError(f"{name}, line {error.lineno}: {error.message}") from None
    # Source that is nested too deeply fails in Python's own parser, with several errors.
    except Exception as error:
        raise DataError(f"{name}: not a chat template: {_describe(error)}") from None


def render_template(template: jinja2.Template, variables: Mapping[str, Any], *, name: str) -> str:
    """The text that a compiled template makes of plain values.

    Raises `DataError` with file and line for whatever goes wrong in it.
    """
    size = chat_limits.size_of(list(variables.values()))
    with spending(Budget(size)):
        try:
            context = template.new_context(dict(variables))
            return "".join(template.root_render_func(context))
        except Exception as error:
            where = f"{name}, line {_line(error)}"
            raise DataError(f"{where}: the chat template failed: {_describe(error)}") from None


def _line(error: Exception) -> int:
    """Line of the template, not of the code made of it, at which `error` was raised."""
    line, frame = 0, error.__traceback__
    while frame is not None:
        template = frame.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            line = template.get_corresponding_lineno(frame.tb_lineno)
        frame = frame.tb_next
    return line


def _describe(error: Exception) -> str:
    """The message; with the kind of error where that is not jinja's or ours."""
    text = str(error)[:LONGEST_MESSAGE]
    ours = isinstance(error, TemplateError | TooMuch)
    return text if ours and text else f"{type(error).__name__}: {text}"

"""How config classes are made: fields in tiers, with a constraint and a doc, checked when built.

`@section("train.")` turns a class into a frozen, keyword-only dataclass. It refuses to create the
class if a field lacks its doc or stands outside the order required < common < rare < internal.
Every construction, also by `dataclasses.replace`, checks names, types and constraints and raises
`ConfigError` with the field's full name, its value and the rule.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, dataclass_transform, get_type_hints

from jaxrl.config import kinds
from jaxrl.config.rules import Rule
from jaxrl.errors import ConfigError

Tier = Literal["required", "common", "rare", "internal"]
TIERS: tuple[Tier, ...] = ("required", "common", "rare", "internal")


@dataclasses.dataclass(frozen=True)
class FieldInfo:
    """What is known of one field: `path` is its full name, `kind` its annotation."""

    name: str
    path: str
    tier: Tier
    kind: Any
    doc: str
    rule: Rule | None
    default: Any
    """`dataclasses.MISSING` for a required field."""

    @property
    def constraint(self) -> str:
        """The rule in words, or "" when every value of the type is accepted."""
        return self.rule.text if self.rule else ""


@dataclasses.dataclass(frozen=True)
class Deprecated:
    """A field name that is on its way out of a section.

    From release `since` the old name warns and its value is carried to the field `to` (ignored
    when `to` is None). Once `removed` is set, the old name raises with `migration`: what to do.
    """

    since: str
    migration: str
    to: str | None = None
    removed: str | None = None


@dataclasses.dataclass(frozen=True)
class SectionInfo:
    """Prefix of the full names, the fields in order, and the names that are deprecated."""

    prefix: str
    fields: Mapping[str, FieldInfo]
    deprecated: Mapping[str, Deprecated]


def required(doc: str, rule: Rule | None = None) -> Any:
    """A field that everybody has to set."""
    return dataclasses.field(metadata={"tier": "required", "doc": doc, "rule": rule})


def common(default: Any, doc: str, rule: Rule | None = None) -> Any:
    """A field that many runs set. A class or function as default is called for each instance."""
    return _optional("common", default, doc, rule)


def rare(default: Any, doc: str, rule: Rule | None = None) -> Any:
    """A field that few runs set."""
    return _optional("rare", default, doc, rule)


def internal(default: Any, doc: str, rule: Rule | None = None) -> Any:
    """A field for tests and experiments of the project; its name starts with an underscore."""
    return _optional("internal", default, doc, rule)


def _optional(tier: Tier, default: Any, doc: str, rule: Rule | None) -> Any:
    metadata = {"tier": tier, "doc": doc, "rule": rule}
    if not callable(default):
        return dataclasses.field(default=default, metadata=metadata)
    # Mappings cannot be hashed; without them the rest of the record still can.
    return dataclasses.field(
        default_factory=default, metadata=metadata, hash=False if default is dict else None
    )


def section_info(cls: Any) -> SectionInfo | None:
    """The description of a class (or instance) made by `section`, or None for anything else."""
    return getattr(cls, "__section__", None)


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    field_specifiers=(required, common, rare, internal, dataclasses.field),
)
def section(
    prefix: str, deprecated: Mapping[str, Deprecated] | None = None
) -> Callable[[type], type]:
    """Decorator that makes a config class; full names of its fields are `prefix` + name.

    Behind the prefix "--" the full name is a flag, and spelt with hyphens.
    A method `check(self)` may hold rules between fields: it calls `demand`. Raises `TypeError`
    when the class breaks the conventions.
    """

    def decorate(cls: type) -> type:
        if "__post_init__" in vars(cls):
            raise TypeError(f"{cls.__name__}: rules between fields belong in check()")
        cls.__post_init__ = _validate
        cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        fields = _describe_fields(cls, prefix)
        _check_deprecated(cls, fields, deprecated or {})
        cls.__section__ = SectionInfo(prefix, fields, dict(deprecated or {}))
        _accept_names(cls)
        return cls

    return decorate


def _describe_fields(cls: type, prefix: str) -> dict[str, FieldInfo]:
    """Field name -> its description; raises `TypeError` where a convention is broken."""
    hints = get_type_hints(cls)
    described: dict[str, FieldInfo] = {}
    latest = 0
    for field in dataclasses.fields(cls):
        where = f"{cls.__name__}.{field.name}"
        tier, doc = field.metadata.get("tier"), field.metadata.get("doc", "").strip()
        if tier is None or not doc:
            raise TypeError(f"{where} must be declared with a tier and a doc")
        if (tier == "internal") != field.name.startswith("_"):
            raise TypeError(f"{where}: internal fields, and no others, start with an underscore")
        if TIERS.index(tier) < latest:
            raise TypeError(f"{where} is {tier} but follows a field that is {TIERS[latest]}")
        latest = TIERS.index(tier)
        kind = hints[field.name]
        if section_info(kind) is None and not kinds.is_supported(kind):
            raise TypeError(f"{where} has the type {kind!r}, which config fields cannot have")
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        path = prefix + (field.name.replace("_", "-") if prefix == "--" else field.name)
        described[field.name] = FieldInfo(
            field.name, path, tier, kind, doc, field.metadata["rule"], default
        )
    return described


def _check_deprecated(
    cls: type, fields: Mapping[str, FieldInfo], deprecated: Mapping[str, Deprecated]
) -> None:
    for name, entry in deprecated.items():
        if name in fields:
            raise TypeError(f"{cls.__name__}.{name} is deprecated and must not be a field any more")
        if entry.to is not None and entry.removed is None and entry.to not in fields:
            raise TypeError(f"{cls.__name__}.{name} moves to {entry.to!r}, which is not a field")
        if not entry.migration.strip():
            raise TypeError(f"{cls.__name__}.{name}: the migration must say what to do")


def _accept_names(cls: type) -> None:
    """Let the constructor check names first: a typo is a `ConfigError` with a suggestion."""
    generated = cls.__init__

    @functools.wraps(generated)
    def init(self: Any, **values: Any) -> None:
        values = current_names(cls, values)
        for field in cls.__section__.fields.values():
            if field.default is dataclasses.MISSING and field.name not in values:
                raise ConfigError(f"{field.path} is required: {field.doc}")
        generated(self, **values)

    init.__signature__ = inspect.signature(generated)
    cls.__init__ = init


def current_names(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value under names of today: deprecated ones are carried over with a warning.

    Raises `ConfigError` for a name that does not exist, was removed, or is given twice.
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        current = current_name(cls, name)
        if current in result or (current != name and current in values):
            raise ConfigError(f"{cls.__section__.prefix}{current} is also given as {name!r}")
        if current is not None:
            result[current] = value
    return result


def current_name(cls: type, name: str) -> str | None:
    """Name of a field -> its name of today; None for a deprecated one that nothing replaces.

    Warns (`FutureWarning`, which is shown by default) about a deprecated name. Raises
    `ConfigError` for one that was removed or never was.
    """
    info: SectionInfo = cls.__section__
    if name in info.fields:
        return name
    entry = info.deprecated.get(name)
    if entry is None:
        raise ConfigError(
            f"{info.prefix}{name} does not exist"
            + (
                kinds.did_you_mean(name, public_names(info), prefix=info.prefix)
                or f"; the names are {', '.join(public_names(info))}"
            )
        )
    if entry.removed is not None:
        raise ConfigError(f"{info.prefix}{name} was removed in {entry.removed}: {entry.migration}")
    warnings.warn(
        f"{info.prefix}{name} is deprecated since {entry.since} and will be removed: "
        f"{entry.migration}",
        FutureWarning,
        stacklevel=4,
    )
    return entry.to


def public_names(info: SectionInfo) -> list[str]:
    """Names of the fields that are not internal, in order."""
    return [field.name for field in info.fields.values() if field.tier != "internal"]


def _validate(self: Any) -> None:
    """Runs at each construction: types, then the rule of each field, then rules between fields."""
    for field in self.__section__.fields.values():
        value = getattr(self, field.name)
        if section_info(field.kind) is not None:
            demand(isinstance(value, field.kind), field.path, value, f"a {field.kind.__name__}")
            continue
        try:
            value = kinds.coerce(field.kind, value)
        except ValueError as error:
            raise ConfigError(f"{field.path}={value!r} must be {error}") from None
        object.__setattr__(self, field.name, value)
        if field.rule is not None and value is not None:
            demand(field.rule.holds(value), field.path, value, field.rule.text)
    check = getattr(self, "check", None)
    if check is not None:
        check()


def demand(holds: bool, path: str, value: Any, rule: str) -> None:
    """Raise `ConfigError` "path=value must be rule" unless it holds."""
    if not holds:
        raise ConfigError(f"{path}={value!r} must be {rule}")


def leaf_fields(cls: type, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted path from `cls`, field) of every public field that is not itself a section."""
    for field in cls.__section__.fields.values():
        if field.tier == "internal":
            continue
        if section_info(field.kind) is None:
            yield prefix + field.name, field
        else:
            yield from leaf_fields(field.kind, f"{prefix}{field.name}.")

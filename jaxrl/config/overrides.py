"""Values from the command line over a config: `train.learning_rate` and `"3e-4"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from jaxrl.config import kinds
from jaxrl.config.experiment import ExperimentConfig
from jaxrl.config.schema import FieldInfo, current_name, leaf_fields, section_info
from jaxrl.config.serialize import from_dict, to_dict
from jaxrl.errors import ConfigError

Config = TypeVar("Config")


def apply_overrides(config: Config, overrides: Mapping[str, str]) -> Config:
    """Config and dotted path -> text; returns a new config, validated as a whole.

    Deprecated names warn and count for the field that replaced them. Raises `ConfigError` for a
    name that does not exist, a text that does not fit the type, and every broken constraint.
    """
    values = to_dict(config)
    seen: dict[tuple[str, ...], str] = {}
    for path, text in overrides.items():
        names, field = resolve(type(config), path)
        if field is None:
            continue  # deprecated, and nothing replaces it
        if names in seen:
            raise ConfigError(f"{field.path} is given twice, as {seen[names]} and as {path}")
        seen[names] = path
        target = values
        for name in names[:-1]:
            target = target[name]
        target[names[-1]] = parse_field(field, text)
    return from_dict(type(config), values)


def parse_field(field: FieldInfo, text: str) -> object:
    """Text of a flag -> value of the field's type. Raises `ConfigError`."""
    try:
        return kinds.parse(field.kind, text)
    except ValueError as error:
        raise ConfigError(f"{field.path}={text!r} must be {error}") from None


def resolve(cls: type, path: str) -> tuple[tuple[str, ...], FieldInfo | None]:
    """Dotted path below `cls` -> (names of today, the field, or None if nothing replaces it).

    Raises `ConfigError` with a suggestion if there is no such field, or if it is a section.
    """
    names: list[str] = []
    field = None
    for name in path.split("."):
        if cls is None:
            raise ConfigError(f"{path} does not exist: {'.'.join(names)} has no fields of its own")
        _refuse_if_elsewhere(cls, name, path)
        current = current_name(cls, name)
        if current is None:
            return (*names, name), None
        names.append(current)
        field = section_info(cls).fields[current]
        cls = field.kind if section_info(field.kind) is not None else None
    if cls is not None:
        example = next(iter(section_info(cls).fields))
        raise ConfigError(f"{path} is a section: set its fields, for example {path}.{example}")
    return tuple(names), field


def _refuse_if_elsewhere(cls: type, name: str, path: str) -> None:
    """Raise if `name` is nothing like a name of `cls` but the leaf of `path` is one elsewhere."""
    info = section_info(cls)
    if name in info.fields or name in info.deprecated or kinds.did_you_mean(name, info.fields):
        return
    leaf = path.rpartition(".")[2]
    places = [p for p, _ in leaf_fields(ExperimentConfig) if p.rpartition(".")[2] == leaf]
    if places:
        raise ConfigError(f"{path} does not exist; did you mean {' or '.join(places)}?")

"""Configuration to `config.json` and back, exactly."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxrl.config.experiment import ExperimentConfig
from jaxrl.config.schema import current_names, section_info
from jaxrl.errors import ConfigError, OutputError

FORMAT = 1
"""Version of the file format: raised when the meaning of the file changes, not for new fields."""

Section = TypeVar("Section")


def to_dict(config: Any) -> dict[str, Any]:
    """Config (or one section) -> nested dict of its fields."""
    fields = section_info(config).fields.values()
    values = {field.name: getattr(config, field.name) for field in fields}
    return {
        name: to_dict(value) if section_info(value) is not None else value
        for name, value in values.items()
    }


def from_dict(cls: type[Section], values: Mapping[str, Any]) -> Section:
    """Nested dict -> config of the class `cls`, validated as a whole. Raises `ConfigError`."""
    info = section_info(cls)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{info.prefix.rstrip('.') or 'config'}={values!r} must be a mapping")
    built = {}
    for name, value in current_names(cls, values).items():
        kind = info.fields[name].kind
        built[name] = from_dict(kind, value) if section_info(kind) is not None else value
    return cls(**built)


def to_record(config: ExperimentConfig) -> dict[str, Any]:
    """Config -> what a `config.json` holds: the version of the format, and the fields."""
    return {"format": FORMAT, "config": to_dict(config)}


def to_json(config: ExperimentConfig) -> str:
    """Config -> text of a `config.json`, which `from_json` reads back as an equal config."""
    return json.dumps(to_record(config), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str) -> ExperimentConfig:
    """Text of a `config.json` -> config. Raises `ConfigError` naming the field or the position."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from None
    if not isinstance(record, dict) or set(record) != {"format", "config"}:
        raise ConfigError('must be an object with exactly the keys "format" and "config"')
    found = record["format"]
    if type(found) is not int or not 1 <= found <= FORMAT:
        raise ConfigError(f"format={found!r} must be at most {FORMAT}, the newest this jaxrl reads")
    return from_dict(ExperimentConfig, record["config"])


def save_config(config: ExperimentConfig, path: str | os.PathLike[str]) -> None:
    """Write `config.json`: readers see the old file or the new one whole. Raises `OutputError`."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(to_json(config), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from None


def load_config(path: str | os.PathLike[str]) -> ExperimentConfig:
    """Read `config.json`. Raises `ConfigError` naming the file and what is wrong with it."""
    text = read_text(path)
    try:
        return from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_text(path: str | os.PathLike[str]) -> str:
    """Text of a file in UTF-8. Raises `ConfigError` naming the file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason}") from None

"""The words of `--help` and of the generated reference, taken from the config classes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator

from jaxrl.config import kinds
from jaxrl.config.experiment import ExperimentConfig
from jaxrl.config.schema import FieldInfo, section_info

WIDTH = 100


def config_sections() -> Iterator[tuple[str, str, list[FieldInfo]]]:
    """(name, first line of its doc, public fields) of the top level ("") and of every section."""
    fields = section_info(ExperimentConfig).fields.values()
    yield "", "The run as a whole.", [f for f in fields if section_info(f.kind) is None]
    for field in fields:
        if section_info(field.kind) is not None:
            yield field.name, first_line(field.kind), public_fields(field.kind)


def public_fields(cls: type) -> list[FieldInfo]:
    """The fields of a class that are not internal, in order."""
    return [field for field in section_info(cls).fields.values() if field.tier != "internal"]


def first_line(cls: type) -> str:
    """First line of the docstring."""
    return inspect.getdoc(cls).partition("\n")[0]


def default_text(field: FieldInfo) -> str:
    """Default as one writes it on the command line; "" for a required field."""
    value = field.default
    if value is dataclasses.MISSING:
        return ""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)


def accepted_text(field: FieldInfo) -> str:
    """Type and constraint in words."""
    kind = kinds.describe(field.kind)
    return f"{kind}, {field.constraint}" if field.constraint else kind


def field_help(field: FieldInfo, flag: str) -> str:
    """One entry of `--help`: flag, tier, default, what is accepted, what it does."""
    default = default_text(field)
    facts = [field.tier, *([f"default {default}"] if default else []), accepted_text(field)]
    return f"  --{flag}\n" + textwrap.fill(
        f"{field.doc} [{'; '.join(facts)}]",
        WIDTH,
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
        break_on_hyphens=False,
    )


def config_help() -> str:
    """All fields of the configuration, grouped by section."""
    parts = []
    for name, doc, fields in config_sections():
        title = f"{name or 'run'}: {doc}"
        entries = [field_help(field, f"config.{field.path}") for field in fields]
        parts.append("\n".join([title, *entries]))
    return "\n\n".join(parts)


def config_markdown() -> str:
    """All fields of the configuration as Markdown, one table for each section."""
    parts = []
    for name, doc, fields in config_sections():
        title = f"### `{name}`" if name else "### Top level"
        rows = [field_row(field, f"config.{field.path}") for field in fields]
        parts.append("\n".join([title, "", doc, "", *TABLE_HEAD, *rows]))
    return "\n\n".join(parts)


TABLE_HEAD = ["| flag | tier | default | accepts | meaning |", "|---|---|---|---|---|"]


def field_row(field: FieldInfo, flag: str) -> str:
    """One row of a Markdown table under `TABLE_HEAD`."""
    default = f"`{default_text(field)}`" if default_text(field) else ""
    cells = [f"`--{flag}`", field.tier, default, accepted_text(field), field.doc]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

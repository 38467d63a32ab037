"""The file in which a run keeps what its compiled programs send: `collectives.json`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxrl.distributed.hlo import Collective, collectives_in
from jaxrl.errors import DataError, DistributedError
from jaxrl.observe.logger import get_logger

_LOGGER = get_logger("distributed")
FILE = "collectives.json"
_MOST_DEVICES = 1 << 20
"""More than any run has."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its name, its inputs in words, its collectives in schedule order."""

    name: str
    inputs: tuple[str, ...]
    collectives: tuple[Collective, ...]


def record_program(folder: Path | str, name: str, program: Any, inputs: Iterable[str] = ()) -> None:
    """Add a compiled program (or its HLO text) to the file in `folder`.

    A program of the same name and inputs is replaced. That it cannot be read or written is a
    warning: a run does not end for it.
    """
    text = program if isinstance(program, str) else program.as_text()
    try:
        new = Program(name, tuple(inputs), collectives_in(text))
    except DistributedError as error:
        _LOGGER.warning("%r is not recorded: %s", name, error)
        return
    path = Path(folder) / FILE
    try:
        kept = read_programs(folder) if path.exists() else ()
    except DataError as error:
        _LOGGER.warning("%s; it is written anew", error)
        kept = ()
    programs = [p for p in kept if (p.name, p.inputs) != (new.name, new.inputs)] + [new]
    part = path.with_name(f".{FILE}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps([dataclasses.asdict(p) for p in programs]), encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        _LOGGER.warning("cannot write %s: %s", path, error)


def read_programs(folder: Path | str) -> tuple[Program, ...]:
    """The programs that the file in `folder` holds. Raises `DataError`."""
    path = Path(folder) / FILE
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(records, list):
            raise TypeError(f"{type(records).__name__} instead of a list")
        return tuple(
            Program(
                _text(record["name"]),
                tuple(_text(line) for line in record["inputs"]),
                tuple(_collective(each) for each in record["collectives"]),
            )
            for record in records
        )
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path} is not a list of programs: {error}") from error


def _collective(record: Mapping[str, Any]) -> Collective:
    one = Collective(
        kind=_text(record["kind"]),
        reduction=None if record["reduction"] is None else _text(record["reduction"]),
        groups=tuple(_numbers(group, _MOST_DEVICES) for group in record["groups"]),
        shapes=tuple(_numbers(shape) for shape in record["shapes"]),
        dtypes=tuple(_text(dtype) for dtype in record["dtypes"]),
        computation=_text(record["computation"]),
        trips=_numbers([record["trips"]])[0],
    )
    if not all(one.groups) or len(one.shapes) != len(one.dtypes):
        raise ValueError(f"an empty group, or not one dtype for each shape: {record!r:.200}")
    return one


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.200} must be text")
    return value


def _numbers(values: Any, most: int = 1 << 62) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value < most:
            raise ValueError(f"{value!r:.200} must be an integer from 0 to {most - 1}")
    return tuple(values)

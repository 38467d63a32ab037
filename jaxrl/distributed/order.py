"""The collective-order check: all processes compare a program before any of them runs it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl.distributed import sides
from jaxrl.distributed.control import Control
from jaxrl.distributed.hlo import KINDS, Collective, collectives_in
from jaxrl.distributed.versions import versions
from jaxrl.errors import CollectiveOrderError, DistributedError
from jaxrl.observe.logger import get_logger

_LOGGER = get_logger("distributed")
_MOST_GROUPS = 8


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What has to be the same on every process before a program may run.

    `collectives` and `inputs` are lines in order; `facts` are versions of code and configuration.
    """

    name: str
    collectives: tuple[str, ...]
    inputs: tuple[str, ...]
    facts: Mapping[str, str]

    def digests(self) -> dict[str, str]:
        """A short value for each part; equal parts have equal values."""
        return {
            "program": self.name,
            "collectives": _digest(self.collectives),
            "inputs": _digest(self.inputs),
            "facts": _digest(sorted(self.facts.items())),
        }

    def encode(self) -> bytes:
        """All of it, compressed."""
        data = json.dumps(dataclasses.asdict(self)).encode()
        return base64.b64encode(zlib.compress(data))

    @staticmethod
    def decode(data: bytes) -> Fingerprint:
        """What `encode` made."""
        record = json.loads(zlib.decompress(base64.b64decode(data)))
        return Fingerprint(
            record["name"],
            tuple(record["collectives"]),
            tuple(record["inputs"]),
            record["facts"],
        )


def fingerprint(
    name: str,
    program: Any,
    inputs: Any = (),
    facts: Mapping[str, Any] | None = None,
) -> Fingerprint:
    """Of a compiled program, or of its HLO text.

    `inputs` is the tree of its arguments, or of `jax.ShapeDtypeStruct`; `facts` are further values
    that have to agree, such as the configuration. Versions and the code of jaxrl are added.
    """
    text = program if isinstance(program, str) else program.as_text()
    all_facts = {**versions(), **sides.flatten(facts or {})}
    return Fingerprint(name, collective_lines(text), input_lines(inputs), all_facts)


def collective_lines(text: str) -> tuple[str, ...]:
    """One line for each collective of HLO `text`, in schedule order.

    Of a form of HLO that is not known yet, the lines of the text themselves: a run does not end
    for it.
    """
    try:
        return tuple(line_of(collective) for collective in collectives_in(text))
    except DistributedError as error:
        _LOGGER.warning("%s; its lines are compared as they are", error)
        found = (line for line in text.splitlines() if any(kind in line for kind in KINDS))
        return tuple(line.partition(", metadata=")[0].strip() for line in found)


def agree(control: Control, mine: Fingerprint, *, number: int, timeout_s: float) -> None:
    """Compare `mine` with the fingerprints of all processes; all must come with the same `number`.

    Raises `CollectiveOrderError` on every process if they are not the same, naming the first
    difference and who is on which side; `HangError` if some do not come within `timeout_s`.
    """
    what = f"the others to be ready for {mine.name!r}"
    tag = f"agree/{number}"
    short = json.dumps(mine.digests()).encode()
    digests = control.gather(tag, short, timeout_s=timeout_s, waiting_for=what)
    if number >= 2:
        # All have come here, so all are done with the one before the last.
        control.forget(f"agree/{number - 2}")
    if len(set(digests.values())) == 1:
        return
    full = control.gather(f"{tag}/full", mine.encode(), timeout_s=timeout_s, waiting_for=what)
    everyone = {process: Fingerprint.decode(data) for process, data in full.items()}
    raise CollectiveOrderError(compare(everyone))


def compare(prints: Mapping[int, Fingerprint]) -> str:
    """Process -> fingerprint: the first difference in words; empty if there is none.

    Causes come before what follows from them: another program, configuration or code, other
    inputs, other collectives.
    """
    names = {process: each.name for process, each in prints.items()}
    if len(set(names.values())) > 1:
        return f"processes are about to run different programs: {sides.sides_of(names)}"
    name = next(iter(names.values()))
    facts = sides.differences({process: each.facts for process, each in prints.items()})
    found = []
    if facts:
        found.append(f"processes run different code or configurations: {'; '.join(facts)}")
    inputs = _first_line("input", {process: each.inputs for process, each in prints.items()})
    collectives = _first_line(
        "collective", {process: each.collectives for process, each in prints.items()}
    )
    found += [part for part in (inputs, collectives) if part]
    return f"program {name!r}: {'; '.join(found)}" if found else ""


def line_of(collective: Collective) -> str:
    """One line: "all-reduce sum f32[4,8] over [[0,1],[2,3]] x3"."""
    arrays = arrays_text(collective)
    reduction = f" {collective.reduction}" if collective.reduction else ""
    trips = f" x{collective.trips}" if collective.trips != 1 else ""
    return f"{collective.kind}{reduction} {arrays} over {groups_text(collective)}{trips}"


def arrays_text(collective: Collective) -> str:
    """The results in short: "f32[4,8], f32[]"."""
    return ", ".join(
        f"{dtype}[{','.join(map(str, shape))}]"
        for dtype, shape in zip(collective.dtypes, collective.shapes, strict=True)
    )


def groups_text(collective: Collective) -> str:
    """The groups in short; many of them by the first ones and a digest of all."""
    groups = collective.groups
    text = json.dumps(groups[:_MOST_GROUPS], separators=(",", ":"))
    if len(groups) <= _MOST_GROUPS and len(text) <= 200:
        return text
    return f"{len(groups)} groups {text[:200]}... ({_digest(groups)})"


def input_lines(inputs: Any) -> tuple[str, ...]:
    """One line for each array of a tree: where it stands, dtype, shape, how it is sharded."""
    leaves = jax.tree_util.tree_leaves_with_path(inputs)
    return tuple(f"{jax.tree_util.keystr(path)} {_array(leaf)}" for path, leaf in leaves)


def _array(leaf: Any) -> str:
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    placed = "" if spec is None else f" {spec}"
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{placed}"


def _first_line(what: str, lines: Mapping[int, Sequence[str]]) -> str:
    """The first line that is not the same on all processes."""
    for index in range(max(map(len, lines.values()))):
        at = {
            process: each[index] if index < len(each) else "none" for process, each in lines.items()
        }
        if len(set(at.values())) > 1:
            counts = {process: len(each) for process, each in lines.items()}
            more = "" if len(set(counts.values())) == 1 else f" (of {sides.sides_of(counts)})"
            return f"{what} {index} differs{more}: {sides.sides_of(at)}"
    return ""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]

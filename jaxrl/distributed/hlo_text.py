"""Reads the text of compiled HLO: computations, their instructions, and how often loops run."""

from __future__ import annotations

import dataclasses
import functools
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<= ]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INTEGER = re.compile(r"-?\d+$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its name, type, opcode, arguments, and the attributes that follow them."""

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str
    root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, without their types."""
        parts = _split(self.arguments)
        return tuple(part.split()[-1].removeprefix("%") for part in parts if part.strip())

    def named(self, attribute: str) -> str:
        """The computation or number that `attribute=` names; empty without it."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return match.group(1) if match else ""


class Module:
    """The computations of one module: name -> lines, parsed when they are asked for."""

    def __init__(self, text: str):
        head = text.split("\n", 1)[0]
        counts = {
            key: re.search(rf"\b{key}=(\d+)", head) for key in ("replica_count", "num_partitions")
        }
        self.replicas, self.partitions = (int(m.group(1)) if m else 1 for m in counts.values())
        self.entry = ""
        self.lines: dict[str, list[str]] = {}
        self._parsed: dict[str, dict[str, Instruction]] = {}
        body: list[str] | None = None
        for line in text.splitlines():
            if body is None:
                if line.endswith("{") and (match := _COMPUTATION.match(line)):
                    body = self.lines[match.group(2)] = []
                    self.entry = match.group(2) if match.group(1) else self.entry
            elif line.rstrip() == "}" or line.startswith("}, execution_thread"):
                body = None
            elif body and line[:1] not in ("", " "):
                body[-1] += line  # attributes of kernels may hold line breaks
            else:
                body.append(line)

    def instructions(self, computation: str) -> dict[str, Instruction]:
        """All instructions of `computation` by name, in schedule order."""
        if computation not in self._parsed:
            parsed = (parse(line) for line in self.lines.get(computation, ()))
            self._parsed[computation] = {one.name: one for one in parsed if one is not None}
        return self._parsed[computation]

    def root(self, computation: str) -> Instruction | None:
        """The instruction whose value `computation` returns."""
        return next((i for i in self.instructions(computation).values() if i.root), None)


def parse(line: str) -> Instruction | None:
    """The instruction on `line`; None for a line that holds none."""
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    rest = line[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    return Instruction(
        name=match.group(2),
        type=rest[:end],
        opcode=opcode.group(1),
        arguments=rest[opcode.end() : close],
        attributes=rest[close + 1 :],
        root=match.group(1) is not None,
    )


def arrays(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array in the text of a type, tuples flattened, tokens left out."""
    # Layouts hold no square brackets, comments no types.
    return [
        (dtype, tuple(int(n.strip(" <=")) for n in dims.split(",") if n.strip()))
        for dtype, dims in _ARRAY.findall(type_text)
        if dtype not in ("token", "opaque")
    ]


def trip_count(module: Module, loop: Instruction, computation: str) -> int | None:
    """How often the body of the while instruction `loop` of `computation` runs; None if unknown.

    What the compiler noted; where it notes nothing (TPU) a counter that starts at a constant, grows
    by a constant and is compared with a constant, as `jax.lax.scan` makes it, is followed.
    """
    noted = _TRIPS.search(loop.attributes)
    if noted:
        return int(noted.group(1))
    inside = module.instructions(loop.named("condition"))
    test = module.root(loop.named("condition"))
    if test is None or test.opcode != "compare" or test.named("direction") != "LT":
        return None
    index, limit = _element(inside, test.operands[0]), _constant(inside, test.operands[1])
    body = module.instructions(loop.named("body"))
    result = module.root(loop.named("body"))
    outside = module.instructions(computation)
    start_tuple = outside.get(loop.operands[0])
    if index is None or limit is None or result is None or start_tuple is None:
        return None
    if not result.opcode == start_tuple.opcode == "tuple":
        return None
    start = _constant(outside, start_tuple.operands[index])
    step = _step(body, result.operands[index], index)
    if start is None or not step:
        return None
    return max(0, -((start - limit) // step))


def _step(body: dict[str, Instruction], name: str, index: int) -> int | None:
    """What is added to element `index` of the loop's tuple in each turn."""
    grown = _behind_copies(body, name)
    if grown is None or grown.opcode != "add":
        return None
    for counter, step in (grown.operands, grown.operands[::-1]):
        if _element(body, counter) == index:
            return _constant(body, step)
    return None


def _behind_copies(inside: dict[str, Instruction], name: str) -> Instruction | None:
    found = inside.get(name)
    while found is not None and found.opcode in ("copy", "bitcast"):
        found = inside.get(found.operands[0])
    return found


def _constant(inside: dict[str, Instruction], name: str) -> int | None:
    found = _behind_copies(inside, name)
    if found is None or found.opcode != "constant" or not _INTEGER.match(found.arguments):
        return None
    return int(found.arguments)


def _element(inside: dict[str, Instruction], name: str) -> int | None:
    """Which element of its parameter `name` is; None for anything else."""
    found = _behind_copies(inside, name)
    if found is None or found.opcode != "get-tuple-element":
        return None
    source = inside.get(found.operands[0])
    return int(found.named("index")) if source and source.opcode == "parameter" else None


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`; the end of `text` if none does."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return start + match.start()
    return len(text)


def _split(text: str) -> list[str]:
    """`text` at its commas, except those inside brackets of any kind; comments left out."""
    text = re.sub(r"/\*.*?\*/", "", text)
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[()\[\]{},]", text):
        mark = match.group()
        if mark == "," and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
        elif mark != ",":
            depth += 1 if mark in "([{" else -1
    return [*parts, text[start:]]

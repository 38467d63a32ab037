"""The collectives of a compiled program, in the order in which each device meets them.

They are read from the text of the compiled HLO (`jitted.lower(...).compile().as_text()`), because
programs that the compiler partitions have no collectives before that. CPU, GPU and TPU texts.
"""

from __future__ import annotations

import dataclasses
import math
import re

from jaxrl.distributed import hlo_text
from jaxrl.distributed.device_groups import Groups, read_groups
from jaxrl.distributed.hlo_text import Instruction, Module
from jaxrl.errors import DistributedError

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_REDUCTIONS = {
    "add": "sum",
    "maximum": "max",
    "minimum": "min",
    "multiply": "product",
    "and": "and",
    "or": "or",
}
_CALLED = re.compile(
    r"\b(?:calls|condition|body|true_computation|false_computation|to_apply)=%?([\w.\-]+)"
    r"|\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
)
_CALLERS = ("calls=", "body=", "to_apply=", "_computation", "called_computations=")
_SIZED = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program, as one device sees it.

    `kind` is one of `KINDS`, `reduction` its named reduction or None. `groups` are tuples of device
    ids (positions in `mesh.devices.flat`), for a collective-permute (source, target) pairs.
    `shapes` and `dtypes` are those of its results on one device. `computation` is the HLO
    computation that it stands in; `trips` how often one run of the program executes it, as far as
    the trip counts of the enclosing loops are known (a loop of unknown length counts once).
    """

    kind: str
    reduction: str | None
    groups: Groups
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    computation: str
    trips: int = 1

    @property
    def group_size(self) -> int:
        """Devices that take part together; 2 for a collective-permute."""
        return max((len(group) for group in self.groups), default=1)

    @property
    def bytes(self) -> int:
        """Size of the results of one execution on one device, in bytes."""
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.ceil(math.prod(shape) * bits(dtype) / 8) for shape, dtype in sizes)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends in one execution with the usual ring algorithm."""
        n = self.group_size
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        if self.kind == "reduce-scatter":
            return (n - 1) * self.bytes
        once = math.ceil(self.bytes * (n - 1) / n)
        return 2 * once if self.kind == "all-reduce" else once


def bits(dtype: str) -> int:
    """Bits of one element of an HLO dtype: "f32" -> 32, "pred" -> 8, "f8e4m3fn" -> 8."""
    size = _SIZED.search(dtype)
    return int(size.group()) if size else 8


def collectives_in(text: str) -> tuple[Collective, ...]:
    """The collectives of compiled HLO `text`, in schedule order from its entry computation.

    Bodies of loops appear once, with their `trips`; both branches of a conditional appear. An
    asynchronous one is counted where it starts. Raises `DistributedError` for groups in a form
    that is not known, and for a text that is damaged.
    """
    module = Module(text)
    try:
        return _Reader(module).collectives(module.entry) if module.entry else ()
    except (ValueError, LookupError) as error:
        raise DistributedError(f"this HLO is not understood: {error}") from error


class _Reader:
    """Collectives of computations, each read once."""

    def __init__(self, module: Module):
        self._module = module
        self._known: dict[str, tuple[Collective, ...]] = {}

    def collectives(self, computation: str) -> tuple[Collective, ...]:
        if computation not in self._known:
            self._known[computation] = ()  # a computation cannot call itself
            lines = self._module.lines.get(computation, ())
            found: list[Collective] = []
            for line in lines:
                if any(kind in line for kind in KINDS) or any(mark in line for mark in _CALLERS):
                    instruction = hlo_text.parse(line)
                    if instruction is not None:
                        found += self._in_instruction(instruction, computation, lines)
            self._known[computation] = tuple(found)
        return self._known[computation]

    def _in_instruction(
        self, instruction: Instruction, computation: str, lines: list[str]
    ) -> list[Collective]:
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            if _goes_on(instruction, lines):
                return []
            return [self._collective(kind, instruction, computation)]
        if instruction.opcode.endswith(("-done", "-update")):
            return []  # `async-start` has named the computation that these name again
        inside = [
            one
            for pair in _CALLED.findall(instruction.attributes)
            for name in (pair[0] or pair[1]).split(",")
            for one in self.collectives(name.strip().removeprefix("%"))
        ]
        if not inside:
            return []
        if instruction.opcode == "while":
            trips = hlo_text.trip_count(self._module, instruction, computation)
            trips = 1 if trips is None else trips
            return [dataclasses.replace(one, trips=one.trips * trips) for one in inside]
        if instruction.named("calls").startswith("all-reduce-scatter") and len(inside) == 1:
            return [_scattered(inside[0], instruction)]
        return inside

    def _collective(self, kind: str, instruction: Instruction, computation: str) -> Collective:
        arrays = hlo_text.arrays(instruction.type)
        count = len(instruction.operands)
        if instruction.opcode in ("all-gather-start", "collective-permute-start"):
            arrays = arrays[count : 2 * count]  # operands, results, then what the device needs
        return Collective(
            kind=kind,
            reduction=self._reduction(instruction),
            groups=read_groups(
                instruction.attributes, self._module.replicas, self._module.partitions
            ),
            shapes=tuple(shape for _, shape in arrays),
            dtypes=tuple(dtype for dtype, _ in arrays),
            computation=computation,
        )

    def _reduction(self, instruction: Instruction) -> str | None:
        applied = instruction.named("to_apply")
        if not applied:
            return None
        root = self._module.root(applied)
        return _REDUCTIONS.get(root.opcode, root.opcode) if root else "unknown"


def _goes_on(instruction: Instruction, lines: list[str]) -> bool:
    """Whether it only carries on, or ends, what an earlier computation of a TPU program starts."""
    if "async_collective_fusion_config" not in instruction.attributes:
        return False
    return not any('"AsyncCollectiveStart"' in line for line in lines)


def _scattered(reduced: Collective, fusion: Instruction) -> Collective:
    """TPUs run an all-reduce of which each device keeps its slice as a reduce-scatter."""
    arrays = hlo_text.arrays(fusion.type)
    return dataclasses.replace(
        reduced,
        kind="reduce-scatter",
        shapes=tuple(shape for _, shape in arrays),
        dtypes=tuple(dtype for dtype, _ in arrays),
    )

"""Operations and memory traffic of one run of a compiled program, read from its text.

The compiler's own `cost_analysis` counts the body of a loop once; here it counts as often as it
runs. How often loops of unknown length run (decoding) is said by the caller.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import numpy as np

from jaxrl.distributed import hlo_text
from jaxrl.distributed.hlo import bits
from jaxrl.distributed.hlo_text import Instruction, Module

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_KERNEL_FLOPS = re.compile(r'"?flops"?:\s*"?(\d+)')
_SPLASH = re.compile(r"splash_mha_(fwd|dq|dkv)")
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Products of the shape of the scores in each of the splash attention kernels."""

_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_NAMES = re.compile(r"%([\w.\-]+)")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
"""What changes its first operand in place, and which operand is written."""

_NO_TRAFFIC = frozenset(
    [
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "add-dependency",
    ]
)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one device: floating-point operations of its matrix products, and bytes that the
    operations read from and write to its memory."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Costs) -> Costs:
        return Costs(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, count: int) -> Costs:
        """`count` runs."""
        return Costs(self.flops * count, self.bytes * count)


def costs_of(text: str, *, unknown_trips: int = 1) -> Costs:
    """Compiled HLO `text` -> the costs of one run, in which loops of unknown length run
    `unknown_trips` times."""
    module = Module(text)
    return _Counter(module, unknown_trips).run(module.entry) if module.entry else Costs()


def in_unknown_loops(text: str) -> frozenset[str]:
    """The computations of compiled HLO `text` that loops of unknown length run."""
    module = Module(text)
    found: set[str] = set()
    for computation in module.lines:
        for one in module.instructions(computation).values():
            if one.opcode == "while" and hlo_text.trip_count(module, one, computation) is None:
                found |= _reachable(module, one.named("body"))
    return frozenset(found)


def not_taken(text: str) -> frozenset[str]:
    """The computations of compiled HLO `text` that `costs_of` leaves out: branches not taken."""
    module = Module(text)
    counter = _Counter(module, 1)
    return frozenset(module.lines) - _reachable(module, module.entry, counter.taken)


def _reachable(
    module: Module, start: str, taken: Callable[[Instruction], str] | None = None
) -> set[str]:
    """`start` and all computations that it runs; of conditionals all branches, or those that
    `taken` names."""
    seen, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in module.lines:
            continue
        seen.add(name)
        for one in module.instructions(name).values():
            chosen = taken is not None and one.opcode == "conditional"
            waiting += [taken(one)] if chosen else _NAMES.findall(one.attributes)
    return seen


class _Counter:
    """Costs of computations, each counted once."""

    def __init__(self, module: Module, unknown_trips: int):
        self._module, self._unknown = module, unknown_trips
        self._runs: dict[str, Costs] = {}
        self._products: dict[str, float] = {}

    def run(self, computation: str) -> Costs:
        """Costs of a computation whose values lie in memory."""
        if computation not in self._runs:
            inside = self._module.instructions(computation)
            parts = [self._cost(one, inside, computation) for one in inside.values()]
            self._runs[computation] = sum(parts, Costs())
        return self._runs[computation]

    def _cost(self, one: Instruction, inside: dict[str, Instruction], computation: str) -> Costs:
        if one.opcode == "while":
            trips = hlo_text.trip_count(self._module, one, computation)
            return self.run(one.named("body")).times(self._unknown if trips is None else trips)
        if one.opcode == "conditional":
            return self.run(self.taken(one))
        if one.opcode == "call":
            return self.run(one.named("to_apply"))
        if one.opcode.endswith(("-done", "-update")):
            return Costs()  # counted where it starts
        if one.opcode.endswith("-start") and not one.named("calls"):
            return Costs()  # transfers between devices have their own account
        flops = self._flops(one, inside)
        return Costs(flops, 0 if one.opcode in _NO_TRAFFIC else self._traffic(one, inside))

    def taken(self, one: Instruction) -> str:
        """The branch of a conditional that counts: that without products, where others have some
        (further rounds of experts, which the usual routing does not need), else the dearest."""
        costs = {name: self.run(name) for name in _branches(one)}
        without = [name for name in costs if not costs[name].flops]
        names = without or list(costs)
        return max(names, key=lambda name: costs[name].flops + costs[name].bytes)

    def _flops(self, one: Instruction, inside: dict[str, Instruction]) -> float:
        """Of an instruction, and of what is fused into it."""
        if one.opcode == "dot":
            return _dot(one, inside)
        if one.opcode == "convolution":
            return _convolution(one, inside)
        if one.opcode == "custom-call":
            return _kernel(one, inside)
        called = one.named("calls")
        if not called:
            return 0.0
        if called not in self._products:
            fused = self._module.instructions(called)
            self._products[called] = sum(self._flops(part, fused) for part in fused.values())
        return self._products[called]

    def _traffic(self, one: Instruction, inside: dict[str, Instruction]) -> float:
        """Operands read and results written; of what is only sliced or written in place, the
        slice."""
        if one.opcode in _SLICES:
            return 2.0 * _size(one)
        if one.opcode in _UPDATES:
            update = inside.get(one.operands[_UPDATES[one.opcode]])
            return 2.0 * _size(update) if update else 0.0
        fused = self._module.instructions(one.named("calls")) if one.opcode == "fusion" else {}
        written, in_place = _written(one, fused)
        carried = {int(operand) for _, operand in _ALIASED.findall(one.attributes)}
        if carried:
            # Buffers of transfers under way pass through, to be filled beside the computation.
            results = _arrays(one)
            passed = (int(output or 0) for output, _ in _ALIASED.findall(one.attributes))
            written -= sum(results[at] for at in passed if at < len(results))
        parameters = _parameters(fused)
        read = 0.0
        for index, name in enumerate(one.operands):
            parameter = parameters.get(index)
            if index in carried:
                continue
            if parameter is not None and parameter.name in in_place:
                continue
            sliced = self._sliced(parameter, fused) if parameter is not None else None
            operand = inside.get(name)
            read += sliced if sliced is not None else (_size(operand) if operand else 0.0)
        return max(written, 0.0) + read

    def _sliced(self, parameter: Instruction, fused: dict[str, Instruction]) -> float | None:
        """Bytes of the slices that a fusion, or one inside it, reads of a parameter; None if it is
        read whole."""
        users, total = _users(parameter, fused), 0.0
        for name, user in users:
            if user.opcode == "fusion":
                inner = self._module.instructions(user.named("calls"))
                places = _parameters(inner)
                at = [places[i] for i, operand in enumerate(user.operands) if operand == name]
                parts = [self._sliced(place, inner) for place in at]
            elif user.opcode in _SLICES and user.operands[0] == name:
                parts = [_size(user)]
            else:
                return None
            if None in parts:
                return None
            total += sum(parts)
        return total if users else None


def _branches(one: Instruction) -> list[str]:
    """Names of the branches of a conditional."""
    found = _BRANCHES.search(one.attributes)
    if found is None:
        return [one.named("true_computation"), one.named("false_computation")]
    return [name.strip().removeprefix("%") for name in found.group(1).split(",")]


def _size(one: Instruction) -> float:
    """Bytes of a value in the device's main memory."""
    return sum(_arrays(one))


def _arrays(one: Instruction) -> list[float]:
    """Bytes of each array of a value in main memory: what lies nearer is marked in its layout."""
    return [
        0.0
        if "S(" in layout or dtype in ("token", "opaque")
        else math.prod(int(n) for n in dims.split(",") if n) * bits(dtype) / 8
        for dtype, dims, layout in _ARRAY.findall(one.type)
    ]


def _written(one: Instruction, fused: dict[str, Instruction]) -> tuple[float, set[str]]:
    """(bytes that a fusion writes, its parameters that are changed in place)."""
    root = next((part for part in fused.values() if part.root), None)
    if root is None:
        return _size(one), set()
    results = root.operands if root.opcode == "tuple" else (root.name,)
    total, in_place = 0.0, set()
    for name in results:
        result = _behind(fused.get(name), fused)
        if result is None or result.opcode not in _UPDATES:
            total += _size(fused[name]) if name in fused else 0.0
            continue
        update = fused.get(result.operands[_UPDATES[result.opcode]])
        target = _behind(fused.get(result.operands[0]), fused)
        total += _size(update) if update else 0.0
        if target is not None:
            in_place.add(target.name)
    return total, in_place


def _behind(one: Instruction | None, inside: dict[str, Instruction]) -> Instruction | None:
    while one is not None and one.opcode in ("bitcast", "copy", "convert") and one.operands:
        one = inside.get(one.operands[0])
    return one


def _parameters(fused: dict[str, Instruction]) -> dict[int, Instruction]:
    """The parameters of a fusion by their number."""
    return {int(part.arguments): part for part in fused.values() if part.opcode == "parameter"}


def _users(one: Instruction, inside: dict[str, Instruction]) -> list[tuple[str, Instruction]]:
    """(name under which it is used, user) of an instruction, other names of its bits included."""
    found = []
    for user in inside.values():
        if one.name in user.operands:
            same = user.opcode == "bitcast"
            found += _users(user, inside) if same else [(one.name, user)]
    return found


def _shape(name: str, inside: dict[str, Instruction]) -> tuple[int, ...]:
    found = inside.get(name)
    arrays = hlo_text.arrays(found.type) if found is not None else []
    return arrays[0][1] if arrays else ()


def _dot(one: Instruction, inside: dict[str, Instruction]) -> float:
    found = _CONTRACTED.search(one.attributes)
    dims = [int(d) for d in found.group(1).split(",") if d] if found else []
    left = _shape(one.operands[0], inside)
    contracted = math.prod(left[dim] for dim in dims if dim < len(left))
    return 2.0 * math.prod(hlo_text.arrays(one.type)[0][1]) * contracted


def _convolution(one: Instruction, inside: dict[str, Instruction]) -> float:
    """A product on TPU: batch dimensions are spatial ones, most of whose window is padding."""
    labels = _LABELS.search(one.attributes)
    if labels is None:
        return 0.0
    lhs, rhs, out = labels.groups()
    left, right = (_shape(name, inside) for name in one.operands[:2])
    result = hlo_text.arrays(one.type)[0][1]
    if len(left) != len(lhs) or len(right) != len(rhs):
        return 0.0
    flops = 2.0 * result[out.index("b")] * result[out.index("f")] * right[rhs.index("i")]
    window = _window(one.attributes)
    for at, label in enumerate(sorted(set(out) - {"b", "f"})):
        sizes = left[lhs.index(label)], right[rhs.index(label)], result[out.index(label)]
        flops *= _valid(*sizes, **{key: values[at] for key, values in window.items()})
    return flops


def _kernel(one: Instruction, inside: dict[str, Instruction]) -> float:
    """What a kernel says of itself; of attention, whose kernels say nothing, half of all pairs of
    tokens: the others are hidden, and skipped."""
    found = _KERNEL_FLOPS.search(one.attributes)
    if found:
        return float(found.group(1))
    splash = _SPLASH.search(one.name)
    # [N, T, H], with rows in front where there are several.
    heads = [shape for name in one.operands if len(shape := _shape(name, inside)) in (3, 4)]
    if splash is None or not heads:
        return 0.0
    query = max(heads, key=math.prod)
    keys = max(shape[-2] for shape in heads if shape[-1] == query[-1])
    return float(_SPLASH_PRODUCTS[splash.group(1)] * math.prod(query) * keys)


def _window(attributes: str) -> dict[str, list]:
    """The window's numbers, by name, one for each spatial dimension."""
    found = _WINDOW.search(attributes)
    parts = dict(part.split("=") for part in found.group(1).split()) if found else {}
    names = {"stride": "stride", "lhs_dilate": "spread", "rhs_dilate": "gap"}
    window: dict[str, list] = {
        to: [int(n) for n in parts[name].split("x")] for name, to in names.items() if name in parts
    }
    if "pad" in parts:
        window["pad"] = [int(pair.split("_")[0]) for pair in parts["pad"].split("x")]
    return window


def _valid(
    size: int,
    kernel: int,
    out: int,
    *,
    stride: int = 1,
    spread: int = 1,
    gap: int = 1,
    pad: int = 0,
) -> int:
    """Pairs of a result's and a kernel's position that meet an element, in one dimension."""
    position = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * gap - pad
    inside = (position >= 0) & (position <= (size - 1) * spread) & (position % spread == 0)
    return int(inside.sum())

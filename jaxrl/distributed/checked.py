"""A jitted function whose programs all processes compare before they first run them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from jaxrl.distributed.order import Fingerprint, fingerprint

_AVAL, _SHARDING = operator.attrgetter("aval"), operator.attrgetter("sharding")


class Host(Protocol):
    """What a checked function needs of `Processes`."""

    def starting(self, entry: str) -> None:
        """A program is about to start."""

    def compiling(self, name: str) -> None:
        """A program is about to be compiled, which may take long."""

    def compiled(self, mine: Fingerprint, program: Any) -> None:
        """Wait until all processes have compiled the same. Raises if they have not."""


@dataclasses.dataclass(frozen=True)
class _Variant:
    """A program for one set of input shapes."""

    key: Any
    program: Any
    entry: str


class Checked:
    """Called like the jitted function it wraps, by all processes in the same order.

    At the first call with inputs of a new shape, dtype or sharding the program is compiled and
    compared; afterwards the compiled program is called as soon as its arguments are seen to be like
    those before. Static arguments are not supported.
    """

    def __init__(self, jitted: Any, name: str, host: Host, facts: Mapping[str, Any] | None = None):
        self.name, self._jitted, self._host = name, jitted, host
        self._facts = dict(facts or {})
        self._variants: list[_Variant] = []
        self._last: _Variant | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program for these arguments.

        Raises `CollectiveOrderError` or `HangError` before a first run for which the processes
        do not agree or do not all come.
        """
        key = _key(args, kwargs)
        last = self._last
        if last is None or last.key != key:
            last = self._last = self._variant(key, args, kwargs)
        self._host.starting(last.entry)
        return last.program(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As of the jitted function."""
        return self._jitted.lower(*args, **kwargs)

    def _cache_size(self) -> int:
        """How many programs there are, as of a jitted function."""
        return len(self._variants)

    def _variant(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Variant:
        for variant in self._variants:
            if variant.key == key:
                return variant
        self._host.compiling(self.name)
        program = self._jitted.lower(*args, **kwargs).compile()
        number = len(self._variants)
        entry = f"{self.name!r}" if number == 0 else f"{self.name!r} variant {number}"
        mine = fingerprint(self.name, program, (args, kwargs) if kwargs else args, self._facts)
        self._host.compiled(mine, program)
        self._variants.append(_Variant(key, program, entry))
        return self._variants[-1]


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What decides which program runs. Fast where all leaves are arrays that programs returned:
    these share the objects that are compared."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    try:
        return structure, tuple(map(_AVAL, leaves)), tuple(map(_SHARDING, leaves))
    except AttributeError:  # a leaf of NumPy or Python
        shardings = tuple(getattr(leaf, "sharding", None) for leaf in leaves)
        return structure, tuple(map(jax.typeof, leaves)), shardings

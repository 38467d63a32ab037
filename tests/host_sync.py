"""Finds places where host code waits for a device: transfer guards see nothing on CPU.

`counting_host_syncs()` records every read of a jax array by the host, from any thread;
`no_host_sync()` makes the first one an error. Import with `from host_sync import …`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.array import ArrayImpl

_READS = (
    "_value",
    "__array__",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__complex__",
    "__iter__",
    "__format__",
    "__repr__",
    "__str__",
    "__buffer__",
    "item",
    "tolist",
    "block_until_ready",
)


_FUNCTIONS = (
    (np, "asarray"),
    (np, "array"),
    (jax, "device_get"),
    (jax, "block_until_ready"),
)


class HostSyncError(AssertionError):
    """The host read a device array where that was forbidden."""


class HostRead(NamedTuple):
    """One read: by what, of which shape, in which thread, and the caller in jaxrl, if any."""

    how: str
    shape: tuple[int, ...]
    thread: str
    caller: str


@dataclasses.dataclass
class HostSyncs:
    """What was read, in order. A read counts once, however it nests."""

    reads: list[HostRead] = dataclasses.field(default_factory=list)
    forbidden: bool = False

    @property
    def count(self) -> int:
        """Number of reads so far."""
        return len(self.reads)


@contextlib.contextmanager
def counting_host_syncs() -> Iterator[HostSyncs]:
    """Records each read of a concrete jax array by the host, in every thread."""
    with _patched(HostSyncs()) as syncs:
        yield syncs


@contextlib.contextmanager
def no_host_sync() -> Iterator[HostSyncs]:
    """Raises HostSyncError at the first read of a concrete jax array by the host, in any thread."""
    with _patched(HostSyncs(forbidden=True)) as syncs:
        yield syncs


@contextlib.contextmanager
def _patched(syncs: HostSyncs) -> Iterator[HostSyncs]:
    inside = threading.local()

    def watch(how: str, function: Callable, leaves: Callable[[tuple], list]) -> Callable:
        def watched(*args: Any, **kwargs: Any) -> Any:
            arrays = leaves(args)
            if not arrays or getattr(inside, "on", False):
                return function(*args, **kwargs)
            thread = threading.current_thread().name
            syncs.reads.append(HostRead(how, arrays[0].shape, thread, _caller()))
            if syncs.forbidden:
                raise HostSyncError(f"{how} read a device array of shape {arrays[0].shape}")
            inside.on = True
            try:
                return function(*args, **kwargs)
            finally:
                inside.on = False

        return watched

    with contextlib.ExitStack() as stack:
        for name in _READS:
            original = ArrayImpl.__dict__.get(name)
            if original is None:
                continue
            if isinstance(original, property):
                new: Any = property(watch(name, original.fget, _first))
            else:
                new = watch(name, original, _first)
            setattr(ArrayImpl, name, new)
            stack.callback(setattr, ArrayImpl, name, original)
        # numpy reads the buffer without calling a method of the array on some versions.
        for module, name in _FUNCTIONS:
            original = getattr(module, name)
            setattr(module, name, watch(f"{module.__name__}.{name}", original, _first_tree))
            stack.callback(setattr, module, name, original)
        yield syncs


def _caller() -> str:
    """The innermost function of the package that is running, as "room.module:function"."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        # Python 3.11 gives a comprehension a frame of its own.
        if module.startswith("jaxrl.") and not frame.f_code.co_name.startswith("<"):
            return f"{module.removeprefix('jaxrl.')}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _first(args: tuple) -> list[Any]:
    return list(args[:1])


def _first_tree(args: tuple) -> list[Any]:
    """Concrete jax arrays in the first argument."""
    return [x for x in jax.tree.leaves(args[:1]) if isinstance(x, ArrayImpl)]

"""A store of keys in memory, with the calls of the client of `jax.distributed` that we use."""

from __future__ import annotations

import threading
import time

from jaxrl.distributed.control import Control


class MemoryStore:
    """Shared by threads that stand for processes."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Set a key."""
        with self._changed:
            if key in self._values and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Wait for a key."""
        deadline = time.monotonic() + timeout_in_ms / 1000
        with self._changed:
            while key not in self._values:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self._values[key]

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        """All keys below one."""
        with self._changed:
            return [pair for pair in self._values.items() if pair[0].startswith(key)]

    def key_value_delete(self, key: str) -> None:
        """Take a key away."""
        with self._changed:
            self._values.pop(key, None)

    def keys(self) -> list[str]:
        """All keys."""
        with self._changed:
            return sorted(self._values)


def controls(count: int) -> list[Control]:
    """The ends of one store for `count` processes."""
    store = MemoryStore()
    return [Control(store, "job", index, count) for index in range(count)]

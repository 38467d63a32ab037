"""Where the arrays of the JetStream engine lie, and the programs compiled for them."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxrl.inference.engine import Engine
from jaxrl.models.decoder import KVCache
from jaxrl.models.model import init_cache
from jaxrl.sharding import Rules


@dataclasses.dataclass(frozen=True)
class Place:
    """Where arrays lie: on a mesh under `rules`, or on one device (None: the first)."""

    mesh: Mesh | None
    device: jax.Device | None
    rules: Rules

    @property
    def as_mesh(self) -> Mesh:
        """The mesh, or one of the only device."""
        if self.mesh is not None:
            return self.mesh
        return Mesh(np.array([self.device or jax.devices()[0]]), ("data",))

    @property
    def whole(self) -> Sharding:
        """Of arrays that every device holds whole."""
        if self.mesh is not None:
            return NamedSharding(self.mesh, PartitionSpec())
        return SingleDeviceSharding(self.device or jax.devices()[0])

    def row(self, dimensions: int) -> Sharding:
        """Of one computed prompt: every group of devices holds it, heads over the tensor axis."""
        if self.mesh is None:
            return self.whole
        layers = (None,) * (dimensions - 4)
        return self.rules.sharding(self.mesh, (*layers, None, "kv_heads", None, None))


class Programs:
    """Compiled programs by key. Threads may share them."""

    def __init__(self) -> None:
        self._compiled: dict[tuple, Callable] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._compiled)

    def get(
        self, key: tuple, function: Callable, *like: Any, donate: tuple[int, ...] = (), out: Any
    ) -> Callable:
        """The program `key`, compiled for arguments like these if it was not before."""
        with self._lock:
            if key not in self._compiled:
                program = jax.jit(function, donate_argnums=donate, out_shardings=out)
                self._compiled[key] = program.lower(*like).compile()
            return self._compiled[key]


def prefix_lengths(engine: Engine) -> tuple[int, ...]:
    """Cache entries that a computed prompt may have: the buckets, and whole chunks, doubling."""
    doubled = [engine.prefill_chunk << i for i in range(engine.cache_length.bit_length())]
    whole = {size for size in doubled if size < engine.cache_length}
    return tuple(sorted({*engine.prefill_buckets, *whole, engine.cache_length}))


def row_like(engine: Engine, length: int, place: Place) -> KVCache:
    """Shapes and placement of one computed prompt of `length` entries."""
    shapes = jax.eval_shape(functools.partial(init_cache, engine.model, 1, length))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place.row(x.ndim)), shapes
    )


def shardings_of(tree: Any) -> Any:
    """The sharding of each leaf."""
    return jax.tree.map(lambda x: x.sharding, tree)

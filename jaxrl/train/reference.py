"""The weights that a KL penalty refers to: on the devices, or in the host's memory meanwhile."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxrl.models.lora import join_frozen, split_frozen
from jaxrl.weights.exchange import copy_to

_HOST = "pinned_host"


class Reference:
    """A copy of `params` that outlives the next update; frozen weights are shared, not copied.

    With `offload` the copy lies in the host's memory: page-locked, each process its own parts,
    where the backend knows such a memory, else as numpy arrays (of a single process).
    """

    def __init__(self, params: Any, *, offload: bool = False):
        trained, self._frozen = split_frozen(params)
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, trained)
        # One weight at a time, so that the devices never hold a second copy of all.
        self._held = jax.tree.map(_to_host if offload else copy_to, trained)

    def params(self) -> Any:
        """The weights on the devices, bit by bit those that came in. Offloaded ones take device
        memory until the caller lets them go."""
        return join_frozen(jax.device_put(self._held, self._shardings), self._frozen)

    @property
    def held(self) -> Any:
        """What is kept of the weights that are trained, where it lies."""
        return self._held


def _to_host(leaf: jax.Array) -> jax.Array | np.ndarray:
    """A copy of one weight in the host's memory."""
    # A copy first: where the device is the host, moving could give the same memory a second name,
    # and the next update donates it.
    leaf = copy_to(leaf)
    devices = leaf.sharding.addressable_devices
    if all(_HOST in {m.kind for m in device.addressable_memories()} for device in devices):
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(_HOST))
    return np.array(leaf)

"""The interceptor that other tests rely on sees every way to read a device array."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_sync import HostSyncError, counting_host_syncs, no_host_sync

READS = {
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "float": float,
    "int": int,
    "bool": bool,
    "index": lambda x: range(10)[x],
    "str": str,
    "format": lambda x: f"{x}",
    "np.asarray": lambda x: np.asarray(x),
    "np.array": lambda x: np.array(x),
    "device_get": lambda x: jax.device_get(x),
    "block_until_ready": lambda x: x.block_until_ready(),
    "jax.block_until_ready": lambda x: jax.block_until_ready(x),
}


def _scalar() -> jax.Array:
    return jax.jit(lambda: jnp.int32(3))()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_each_read_is_counted_once_and_can_be_forbidden(read):
    with counting_host_syncs() as syncs:
        read(_scalar())
    assert syncs.count == 1

    with pytest.raises(HostSyncError), no_host_sync():
        read(_scalar())
    read(_scalar())


def test_work_that_stays_on_the_device_is_free():
    double = jax.jit(lambda x: x * 2)
    with no_host_sync():
        y = double(_scalar())
        double(np.ones(3, np.float32))
    assert int(y) == 6


def test_reads_of_other_threads_are_seen_with_their_names():
    x = _scalar()
    with counting_host_syncs() as syncs:
        thread = threading.Thread(target=lambda: np.asarray(x), name="reader")
        thread.start()
        thread.join()
    assert [(read.shape, read.thread) for read in syncs.reads] == [((), "reader")]

"""Starts and ends `jax.distributed` so that a lost process does not end the others at once."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import clusters, distributed

from jaxrl.distributed.rendezvous import is_loopback
from jaxrl.distributed.service import Service
from jaxrl.errors import DistributedError

_SHUTDOWN_S = 15
"""Seconds; all have met before they disconnect."""


def detect(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_s: float
) -> tuple[str | None, int | None, int | None]:
    """The given values, and where None those that the cluster (TPU pod, Slurm, MPI) tells.

    Raises `DistributedError` for a cluster that tells something else than it should.
    """
    try:
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, num_processes, process_id, None, None, int(timeout_s)
        )
    except Exception as error:  # each cluster has its own
        raise DistributedError(f"the cluster does not say who takes part: {error}") from error
    return found[0], found[1], found[2]


def backend_started() -> bool:
    """Whether JAX has found its devices already; then it is too late to connect processes."""
    return jax._src.xla_bridge.backends_are_initialized()


def connect(address: str, count: int, index: int, *, timeout_s: float, heartbeat_s: int) -> Any:
    """Connect this process, and return the client of the store. All have met before."""
    host, port = address.rsplit(":", 1)
    # SIGTERM belongs to the program: with JAX's preemption service on, nothing would end it.
    jax.config.update("jax_enable_preemption_service", False)
    bind = address if is_loopback(host.strip("[]")) else f"[::]:{port}"
    try:
        with _service_beside():
            jax.distributed.initialize(
                address,
                count,
                index,
                initialization_timeout=max(1, int(timeout_s)),
                heartbeat_timeout_seconds=heartbeat_s,
                shutdown_timeout_seconds=_SHUTDOWN_S,
                coordinator_bind_address=bind,
            )
    except RuntimeError as error:
        raise DistributedError(f"process {index} cannot connect to {address}: {error}") from error
    return distributed.global_state.client


def disconnect() -> None:
    """Leave in good order, when all have done their work."""
    jax.distributed.shutdown()


def abandon() -> None:
    """Leave JAX's connection as it is: its orderly end waits for others that may never come."""
    state = distributed.global_state
    for handle in (state.client, state.service):
        if handle is not None:
            # The end of the client would wait too; the process is about to end anyway.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
    state.client = state.service = None


@contextlib.contextmanager
def _service_beside() -> Iterator[None]:
    """Let `jax.distributed.initialize` make its service in another process."""
    module = distributed._jax
    service, client = (
        module.get_distributed_runtime_service,
        module.get_distributed_runtime_client,
    )

    def start(address: str, count: int, **options: Any) -> Service:
        return Service(
            address, count, int(options["heartbeat_timeout"]), int(options["shutdown_timeout"])
        )

    module.get_distributed_runtime_service = start
    module.get_distributed_runtime_client = functools.partial(client, shutdown_on_destruction=False)
    try:
        yield
    finally:
        module.get_distributed_runtime_service = service
        module.get_distributed_runtime_client = client

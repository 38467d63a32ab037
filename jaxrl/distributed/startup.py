"""Joins a process to its job: the meeting, the connection, the watchdog."""

from __future__ import annotations

import dataclasses
import operator
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.distributed import connection, rendezvous, sides
from jaxrl.distributed.control import Control
from jaxrl.distributed.processes import Processes
from jaxrl.distributed.versions import versions
from jaxrl.distributed.watchdog import Watch
from jaxrl.errors import DistributedError
from jaxrl.observe.logger import get_logger

_LOGGER = get_logger("distributed")
_PORT = re.compile("[0-9]{1,5}")
_MOST = 1 << 20
"""Processes; more than any cluster has."""
_joined: Processes | None = None
_ALONE = Processes.alone({}, None)


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: float = 60.0,
    fingerprint: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    logs: Path | str | None = None,
    agree_timeout_s: float = 600.0,
) -> Processes:
    """Make this process one of its job's `num_processes`; before anything else of JAX is used.

    `coordinator` is "host:port" of process 0. Values that are None come from the cluster (TPU pod,
    Slurm, Open MPI); without a cluster, and for one process, there is nothing to connect and the
    result does nothing at no cost. `fingerprint` is what all processes must agree on beside the
    versions and the code of jaxrl, such as the configuration: nested mappings. Reports of the
    watchdog go to the folder `logs`. `agree_timeout_s` bounds how long the others may take to
    compile what this process has compiled. A second call returns what the first one made; numbers
    of another process are an error then.

    Raises `DistributedError`, on every process that has arrived and within about `timeout_s`:
    unreachable coordinator, missing process, wrong number, duplicate id, other code, other values.
    """
    global _joined
    if _joined is not None and not _joined.closed:
        _check_same(_joined, num_processes, process_id)
        return _joined
    logs = None if logs is None else Path(logs)
    _check_options(timeout_s, agree_timeout_s, fingerprint, watch)
    if None in (coordinator, num_processes, process_id):
        coordinator, num_processes, process_id = connection.detect(
            coordinator, num_processes, process_id, timeout_s
        )
    facts = sides.flatten(fingerprint or {})
    alone = coordinator is None and num_processes in (None, 1)
    if not alone:
        index, count = _check_numbers(num_processes, process_id)
        host, port = _address(coordinator)
        alone = count == 1
    if alone:
        _joined = Processes.alone(facts, logs)
        return _joined
    if connection.backend_started():
        raise DistributedError("join() comes too late: JAX has already been used in this process")
    watch = Watch() if watch is None else watch
    started = time.monotonic()
    control = _connect(index, count, host, port, facts, timeout_s, watch)
    _joined = Processes(control, facts, watch, logs, agree_timeout_s)
    try:
        _joined.start(timeout_s)
    except BaseException as error:
        _joined.fail(error)
        raise
    took = time.monotonic() - started
    _LOGGER.info("process %d of %d joined at %s:%d in %.1f s", index, count, host, port, took)
    return _joined


def _connect(
    index: int,
    count: int,
    host: str,
    port: int,
    facts: Mapping[str, str],
    timeout_s: float,
    watch: Watch,
) -> Control:
    """Meet the others, then let JAX connect them."""
    where = f"{socket.gethostname()}, pid {os.getpid()}"
    hello = rendezvous.Hello(index, count, {**versions(), **facts}, where)
    job = rendezvous.meet(hello, host, port, timeout_s)
    client = connection.connect(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        count,
        index,
        timeout_s=timeout_s,
        # The watchdog comes first: JAX only ends the process.
        heartbeat_s=int(max(100, 3 * watch.dead_after_s + watch.grace_s)),
    )
    return Control(client, job, index, count)


def current() -> Processes:
    """The job that this process has joined, or itself alone.

    Raises `DistributedError` if JAX was made one of several processes in another way: then nothing
    would be checked.
    """
    if _joined is not None and not _joined.closed:
        return _joined
    if connection.backend_started():
        import jax

        if jax.process_count() > 1:
            raise DistributedError(
                f"JAX has {jax.process_count()} processes that did not meet in "
                "jaxrl.distributed.join(): call it in place of jax.distributed.initialize()"
            )
    return _ALONE


def _check_numbers(num_processes: int | None, process_id: int | None) -> tuple[int, int]:
    """(index, count). Raises `DistributedError`."""
    count, index = _integer("num_processes", num_processes), _integer("process_id", process_id)
    if not 1 <= count <= _MOST:
        raise DistributedError(f"num_processes={count} must be between 1 and {_MOST}")
    if index < 0:
        raise DistributedError(f"process_id={index} must be at least 0")
    return index, count


def _integer(name: str, value: Any) -> int:
    """Also one of NumPy."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise DistributedError(f"{name}={value!r} must be an integer")
    return operator.index(value)


def _check_options(timeout_s: Any, agree_timeout_s: Any, fingerprint: Any, watch: Any) -> None:
    """Before anybody waits for this process. Raises `DistributedError`."""
    if not isinstance(fingerprint, Mapping | None):
        raise DistributedError(f"fingerprint={fingerprint!r} must be a mapping")
    if not isinstance(watch, Watch | None):
        raise DistributedError(f"watch={watch!r} must be a Watch")
    times = {"timeout_s": timeout_s, "agree_timeout_s": agree_timeout_s}
    if watch is not None:
        times |= {f"watch.{name}": value for name, value in dataclasses.asdict(watch).items()}
    for name, value in times.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e8:
            raise DistributedError(f"{name}={value!r} must be seconds, above 0 and at most 1e8")


def _check_same(joined: Processes, num_processes: Any, process_id: Any) -> None:
    """Whether a further call means the job that this process is part of."""
    for name, value, had in (
        ("num_processes", num_processes, joined.count),
        ("process_id", process_id, joined.index),
    ):
        if value is not None and _integer(name, value) != had:
            raise DistributedError(
                f"{name}={value}: this process has joined already, as process {joined.index} of "
                f"{joined.count}"
            )


def _address(coordinator: str | None) -> tuple[str, int]:
    """ "host:port", "[::1]:port" -> (host, port). Raises `DistributedError`."""
    host, _, port = coordinator.rpartition(":") if isinstance(coordinator, str) else ("", "", "")
    if not host or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise DistributedError(
            f"coordinator={coordinator!r} must be host:port, the address of process 0"
        )
    try:
        host.encode("idna")  # as sockets do
    except UnicodeError as error:
        raise DistributedError(
            f"coordinator={coordinator!r}: {host!r} cannot be the name of a machine"
        ) from error
    return host.strip("[]"), int(port)

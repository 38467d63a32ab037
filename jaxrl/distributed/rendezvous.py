"""The meeting of all processes of a job before JAX connects them.

`jax.distributed` ends the process with SIGABRT when another one is missing. So everyone first meets
at the coordinator's port: process 0 listens, all say who they are and what they run, and all get
the same answer: go, or what is wrong and with whom. Then the port is free for JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import selectors
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any

from jaxrl.distributed import sides
from jaxrl.errors import DistributedError
from jaxrl.observe.logger import get_logger

_LOGGER = get_logger("distributed")
_MAGIC = "jaxrl-meeting-1"
_MOST_BYTES = 1 << 20
_READ_S = 10.0
"""How long a connection may take to say who it is; strangers are closed then."""
_GRACE_S = 3.0
"""How long the coordinator waits for the others once it knows that the job cannot start."""
_RETRY_S = 0.2
"""Pause between two attempts to reach the coordinator."""


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a process says of itself: its number, how many it expects, and what it runs."""

    process_id: int
    num_processes: int
    facts: Mapping[str, str]
    where: str

    def encode(self) -> bytes:
        """One line."""
        line = json.dumps({"meeting": _MAGIC, **dataclasses.asdict(self)}) + "\n"
        data = line.encode()
        if len(data) > _MOST_BYTES:
            raise DistributedError(f"fingerprint of {len(data)} bytes: at most {_MOST_BYTES}")
        return data


def meet(hello: Hello, host: str, port: int, timeout_s: float) -> str:
    """Wait until all processes have arrived and agree. Returns an id of the job, equal on all.

    Raises `DistributedError`, on every process that has arrived, for an id that is out of range or
    taken, another number of processes, facts that differ, and processes that did not arrive within
    `timeout_s` seconds; each names the processes on each side.
    """
    visitor = _Visitor(hello, host, port, time.monotonic() + timeout_s)
    while visitor.left() > 0:
        if hello.process_id == 0:
            # A port that is taken may be another process 0, which will say so, or an earlier job's.
            listener = _listen(host, port)
            if listener is not None:
                with listener:
                    return _Coordinator(listener, hello, timeout_s).run()
        job = visitor.visit()
        if job:
            return job
        time.sleep(max(0.0, min(_RETRY_S, visitor.left())))
    raise DistributedError(visitor.complaint(timeout_s))


def decode_hello(line: bytes) -> Hello | None:
    """The greeting in `line`; None if it is something else."""
    try:
        record = json.loads(line)
        if record.pop("meeting") != _MAGIC:
            return None
        hello = Hello(**record)
        facts = {str(name): str(value) for name, value in hello.facts.items()}
        numbers = (hello.process_id, hello.num_processes)
        if any(type(number) is not int for number in numbers):
            return None
        return dataclasses.replace(hello, facts=facts, where=str(hello.where))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def judge(expected: int, hellos: list[Hello]) -> str:
    """What keeps a job of `expected` processes from starting; empty if nothing does."""
    problems = []
    counts = {h.process_id: h.num_processes for h in hellos}
    if set(counts.values()) - {expected}:
        problems.append(f"num_processes differs: {sides.sides_of(counts)}")
    outside = [h for h in hellos if not 0 <= h.process_id < expected]
    problems += [
        f"process_id={h.process_id} ({h.where}) must be between 0 and {expected - 1}"
        for h in outside
    ]
    places: dict[int, list[str]] = {}
    for h in hellos:
        places.setdefault(h.process_id, []).append(h.where)
    problems += [
        f"process_id={number} is taken {len(where)} times: {', '.join(where)}"
        for number, where in sorted(places.items())
        if len(where) > 1
    ]
    missing = set(range(expected)) - set(places)
    if missing:
        problems.append(f"{sides.name_processes(missing)} of {expected} did not arrive")
    problems += sides.differences({h.process_id: h.facts for h in hellos})
    return "; ".join(problems)


class _Coordinator:
    """Process 0: collects what everyone says, and answers all of them at once."""

    def __init__(self, listener: socket.socket, own: Hello, timeout_s: float):
        self._listener, self._own, self._timeout_s = listener, own, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._selector = selectors.DefaultSelector()
        self._unknown: dict[socket.socket, tuple[bytearray, float]] = {}
        self._arrived: dict[socket.socket, Hello] = {}
        self._strangers = 0

    def run(self) -> str:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._complete() and time.monotonic() < self._deadline:
                for key, _ in self._selector.select(timeout=0.1):
                    self._serve(key.fileobj)  # type: ignore[arg-type]
                self._drop_slow()
            return self._answer()
        finally:
            for connection in [*self._unknown, *self._arrived]:
                connection.close()
            self._selector.close()

    def _complete(self) -> bool:
        ids = {0, *(hello.process_id for hello in self._arrived.values())}
        return len(ids) == self._own.num_processes and not self._impossible()

    def _impossible(self) -> bool:
        """Whether waiting for more cannot help any more."""
        ids = [0, *(hello.process_id for hello in self._arrived.values())]
        expected = self._own.num_processes
        return (
            len(set(ids)) < len(ids)
            or not set(ids) <= set(range(expected))
            or any(hello.num_processes != expected for hello in self._arrived.values())
        )

    def _serve(self, connection: socket.socket) -> None:
        if connection is self._listener:
            with contextlib.suppress(OSError):
                accepted, _ = self._listener.accept()
                accepted.setblocking(False)
                if len(self._unknown) >= 64 + self._own.num_processes:
                    self._close(next(iter(self._unknown)))
                self._unknown[accepted] = (bytearray(), time.monotonic())
                self._selector.register(accepted, selectors.EVENT_READ)
            return
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data or connection in self._arrived:
            self._close(connection)  # gone, or says more than it may
            return
        received = self._unknown[connection][0]
        received += data
        if b"\n" in received or len(received) > _MOST_BYTES:
            self._greet(connection, bytes(received))

    def _greet(self, connection: socket.socket, data: bytes) -> None:
        hello = decode_hello(data.partition(b"\n")[0]) if len(data) <= _MOST_BYTES else None
        if hello is None:
            self._strangers += 1
            self._close(connection)
            return
        del self._unknown[connection]
        self._arrived[connection] = hello
        if self._impossible():
            self._deadline = min(self._deadline, time.monotonic() + _GRACE_S)
        ids = {0, *(hello.process_id for hello in self._arrived.values())}
        missing = sorted(set(range(self._own.num_processes)) - ids)
        self._tell({"missing": missing[:1000]})

    def _close(self, connection: socket.socket) -> None:
        self._unknown.pop(connection, None)
        self._arrived.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def _drop_slow(self) -> None:
        now = time.monotonic()
        for connection, (_, since) in list(self._unknown.items()):
            if now - since > _READ_S:
                self._strangers += 1
                self._close(connection)

    def _answer(self) -> str:
        problem = judge(self._own.num_processes, [self._own, *self._arrived.values()])
        if problem and time.monotonic() >= self._deadline and not self._impossible():
            problem += f" (waited {self._timeout_s:g} s)"
        if self._strangers:
            _LOGGER.warning(
                "%d connections to the coordinator's port were not ours", self._strangers
            )
        job = uuid.uuid4().hex[:12]
        self._tell({"problem": problem} if problem else {"go": job})
        if problem:
            raise DistributedError(f"the job cannot start: {problem}")
        return job

    def _tell(self, answer: Mapping[str, Any]) -> None:
        line = (json.dumps(answer) + "\n").encode()
        for connection in list(self._arrived):
            try:
                connection.settimeout(_READ_S)
                connection.sendall(line)
                connection.setblocking(False)
            except OSError:
                self._close(connection)


def _listen(host: str, port: int) -> socket.socket | None:
    """A listening socket; None if the port is taken, perhaps by another process 0."""
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=256)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256
            )
        return socket.create_server(("", port), backlog=256)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise DistributedError(
            f"process 0 cannot listen on port {port} for the others: {error.strerror or error}"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine as seen from itself only."""
    return host in ("localhost", "::1") or host.startswith("127.")


class _Visitor:
    """Any other process: says hello to the coordinator until it answers."""

    def __init__(self, hello: Hello, host: str, port: int, deadline: float):
        self._hello, self._address, self._deadline = hello, (host, port), deadline
        self._reason, self._missing = "no answer", [0]

    def left(self) -> float:
        """Seconds until time is up."""
        return self._deadline - time.monotonic()

    def visit(self) -> str | None:
        """One attempt: the id of the job, None if it has to be repeated."""
        self._missing = [0]  # until it says otherwise, also where an earlier attempt heard it
        try:
            limit = max(0.001, min(self.left(), 5.0))
            with socket.create_connection(self._address, timeout=limit) as connection:
                connection.sendall(self._hello.encode())
                # The coordinator's time may end a little after ours.
                for answer in _answers(connection, self._deadline + _GRACE_S):
                    if "go" in answer:
                        return str(answer["go"])
                    if "problem" in answer:
                        raise DistributedError(f"the job cannot start: {answer['problem']}")
                    self._missing = _numbers(answer.get("missing"))
            self._reason = "what listens there is not waiting for this process"
        except OSError as error:
            self._reason = error.strerror or str(error) or type(error).__name__
        return None

    def complaint(self, timeout_s: float) -> str:
        """Why it did not become a job."""
        number, where = self._hello.process_id, "{}:{}".format(*self._address)
        if number == 0:
            return f"process 0 cannot listen on {where}: another program uses the port"
        if 0 not in self._missing:
            who = sides.name_processes(self._missing) if self._missing else "some process"
            return (
                f"process {number} waited {timeout_s:g} s: {who} of {self._hello.num_processes} "
                "did not arrive"
            )
        return (
            f"process {number} cannot reach the coordinator, process 0, at {where} within "
            f"{timeout_s:g} s ({self._reason}): is process 0 running, is the address right, is the "
            f"port open, and is process_id={number} free?"
        )


def _numbers(said: Any) -> list[int]:
    """Who is missing; process 0, as far as anybody knows, if it is no coordinator that says so."""
    if not isinstance(said, list) or any(type(number) is not int for number in said):
        return [0]
    return said


def _answers(connection: socket.socket, deadline: float) -> Any:
    """The lines that the coordinator sends, as mappings, until it closes or time is up."""
    received = b""
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            data = connection.recv(65536)
        except TimeoutError:
            return
        received += data
        if not data or len(received) > _MOST_BYTES:
            return
        *lines, received = received.split(b"\n")
        for line in lines:
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not isinstance(answer, dict):
                return
            yield answer

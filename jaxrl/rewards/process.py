"""The pool's side of one reward process: start it, give it an item, kill it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Literal

from jaxrl.errors import RewardError
from jaxrl.rewards.wire import HEADER_BYTES, send_message

POLL_S = 0.1
"""How often a wait looks whether the process still lives."""

KILL_WAIT_S = 5.0
"""Longest wait for a killed process to disappear."""

_LONGEST_REPLY = 1 << 20
_PROTOCOL = "it broke the protocol"

_BOOT = (
    "import sys; sys.path[:] = sys.argv[4].split('\\n'); "
    "from jaxrl.rewards.worker import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))"
)


@dataclasses.dataclass(frozen=True, slots=True)
class RewardResult:
    """How scoring one item ended. `value` is a finite number exactly when `outcome` is "ok".

    "timeout": the scorer ran longer than the limit. "error": it raised, returned something that is
    not a finite number (bool and None included), or its process died. `detail` says which.
    """

    value: float | None
    outcome: Literal["ok", "timeout", "error"]
    detail: str = ""


class _Expired(Exception):
    """A wait reached its deadline."""


class _Died(Exception):
    """The process is gone, or does not speak the protocol any more; the message is the cause."""


class WorkerProcess:
    """One running reward process. Used by one thread; `kill` may come from any.

    A fresh interpreter (exec, never a bare fork: JAX has threads) that does not import the main
    module. It leads a session of its own, so Ctrl-C in the terminal does not reach it and killing
    its group takes along what a reward started. JAX_PLATFORMS=cpu keeps a reward that imports jax
    off the accelerator of the run.
    """

    def __init__(self, scorer: bytes, *, timeout_s: float, start_timeout_s: float):
        """Start the process; `wait_ready` then waits until it has the scorer (pickled)."""
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._buffer = bytearray()
        self.usable = True
        self.started = False
        self._channel, theirs = socket.socketpair()
        with theirs:
            arguments = [theirs.fileno(), os.getpid(), timeout_s, "\n".join(sys.path)]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *map(str, arguments)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                start_new_session=True,
            )
        self._scorer = scorer

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the scorer is loaded. Raises `RewardError` with the cause; then kill."""
        limit = self._start_timeout_s
        try:
            self._send(self._scorer, limit)
            message = self._receive(time.monotonic() + limit)
        except _Expired:
            raise RewardError(f"a reward process was not ready within {limit:g} s") from None
        except _Died as error:
            raise RewardError(f"a reward process ended while starting: {error}") from None
        if message.get("event") != "ready":
            raise RewardError(f"a reward process cannot load the scorer: {message.get('detail')}")

    def score(self, item: bytes) -> RewardResult:
        """Score one pickled (completion, reference). Not `usable` any more after a bad end.

        The time limit counts from when the process has the item and starts the scorer; `started`
        says whether it came to that.
        """
        self.started = False
        try:
            self._send(item, self._start_timeout_s)
            message = self._receive(time.monotonic() + self._start_timeout_s)
            if message.get("event") == "started":
                self.started = True
                message = self._receive(time.monotonic() + self._timeout_s)
            if message.get("event") != "done":
                raise _Died(_PROTOCOL)
            return RewardResult(message["value"], message["outcome"], message["detail"])
        except _Died as error:
            result = RewardResult(None, "error", f"the reward process ended: {error}")
        except _Expired:
            if self.started:
                detail = f"ran longer than the limit of {self._timeout_s:g} s and was killed"
                result = RewardResult(None, "timeout", f"the scorer {detail}")
            else:
                detail = f"did not take the item within {self._start_timeout_s:g} s"
                result = RewardResult(None, "error", f"a reward process {detail}")
        self.usable = False
        return result

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process and everything in its group; bounded, may be repeated."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # Wakes a thread that waits for an answer.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_WAIT_S)

    def dispose(self) -> None:
        """Kill, and give the socket back. For the thread that uses this process."""
        self.kill()
        self._channel.close()

    def _send(self, payload: bytes, limit: float) -> None:
        self._channel.settimeout(limit)
        try:
            send_message(self._channel, payload)
        except TimeoutError:
            raise _Expired from None
        except OSError:
            raise _Died(self._cause()) from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message. Raises `_Expired` or `_Died`."""
        length = int.from_bytes(self._take(HEADER_BYTES, deadline), "big")
        if length > _LONGEST_REPLY:
            raise _Died(_PROTOCOL)
        try:
            message = json.loads(self._take(length, deadline))
        except ValueError:
            raise _Died(_PROTOCOL) from None
        return message if isinstance(message, dict) else {}

    def _take(self, count: int, deadline: float) -> bytes:
        """The next `count` bytes."""
        ended = False
        while len(self._buffer) < count:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise _Expired
            self._channel.settimeout(min(remaining, POLL_S))
            try:
                part = self._channel.recv(1 << 16)
            except TimeoutError:
                # The socket stays open when a child of the dead process has inherited it; what it
                # sent before its death is read first.
                if ended:
                    raise _Died(self._cause()) from None
                ended = not self.alive
                continue
            except OSError:
                part = b""
            if not part:
                raise _Died(self._cause())
            self._buffer += part
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _cause(self) -> str:
        """Why the process is gone, in words."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its channel"
        if code >= 0:
            return f"it exited with status {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"it was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

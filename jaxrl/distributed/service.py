"""The coordination service of JAX, in a process of its own beside process 0.

JAX keeps it inside process 0, and ends every other process at once, with SIGABRT and without a
reason, when it goes away. Here it outlives process 0 for as long as others are connected, so that
they can find out who is missing, say so, and end by themselves. Needs jaxlib alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

from jaxrl.errors import DistributedError

_LINGER_S = 120.0
"""How long it stays at most after process 0 has gone."""
_START_S = 60.0
_READY = "ready"


class Service:
    """Handle of the service, in the place of JAX's own in process 0."""

    def __init__(self, address: str, count: int, heartbeat_s: int, shutdown_s: int):
        arguments = [address, str(count), str(heartbeat_s), str(shutdown_s)]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "1", **os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        self._process = subprocess.Popen(
            # -P: the folder of this file is not a place to import from.
            [sys.executable, "-P", __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The signals that end process 0 must not end it too.
            start_new_session=True,
            env={
                "TF_CPP_MIN_LOG_LEVEL": "1",
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
        )
        said = self._first_line()
        if said != _READY:
            self._process.kill()
            self._process.wait()
            raise DistributedError(f"the coordination service cannot start on {address}: {said}")

    def _first_line(self) -> str:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _START_S)
        if not readable:
            return f"it did not answer for {_START_S:g} s"
        return self._process.stdout.readline().decode(errors="replace").strip() or "it has ended"

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def shutdown(self) -> None:
        """Process 0 needs it no more. It ends by itself once nobody is connected: JAX ends a
        process whose service goes away, also one that is just about to leave."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]


def _connections(port: int) -> int | None:
    """Established connections to local `port`; None where the system does not tell."""
    count = 0
    try:
        for name in ("/proc/net/tcp", "/proc/net/tcp6"):
            if os.path.exists(name):
                with open(name, encoding="ascii") as table:
                    rows = [line.split() for line in table.readlines()[1:]]
                count += sum(int(r[1].rsplit(":", 1)[1], 16) == port and r[3] == "01" for r in rows)
    except (OSError, ValueError, IndexError):
        return None
    return count if os.path.exists("/proc/net/tcp") else None


def _serve(address: str, count: int, heartbeat_s: int, shutdown_s: int) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    from jaxlib import _jax

    try:
        _service = _jax.get_distributed_runtime_service(
            address, count, heartbeat_timeout=heartbeat_s, shutdown_timeout=shutdown_s
        )
    except Exception as error:  # whatever jaxlib raises, process 0 has to say it
        sys.stdout.write(" ".join(str(error).split()) + "\n")
        sys.stdout.flush()
        return
    sys.stdout.write(_READY + "\n")
    sys.stdout.flush()
    _wait_for_process_0()
    _linger(int(address.rsplit(":", 1)[1]))
    os._exit(0)


def _wait_for_process_0() -> None:
    """Until it closes the pipe, or ends."""
    parent = os.getppid()
    # The end of stdin does not tell all: children of process 0 may hold the pipe open.
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], 0.5)
        if readable:
            return


def _linger(port: int) -> None:
    """Stay while others are connected: they may still have to say why they end."""
    deadline = time.monotonic() + _LINGER_S
    alone = 0
    while time.monotonic() < deadline and alone < 3:
        time.sleep(0.3)
        alone = alone + 1 if _connections(port) == 0 else 0


if __name__ == "__main__":
    _serve(sys.argv[1], *(int(number) for number in sys.argv[2:5]))

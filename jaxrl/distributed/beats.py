"""What a process says of itself again and again, and what others make of it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
import time
from typing import Any, Literal

Stage = Literal["idle", "running", "compiling", "agreeing", "closing"]


@dataclasses.dataclass(frozen=True)
class Beat:
    """One sign of life. `doing` says where the process is, `for_s` for how many seconds already;
    `launches` is the number of programs that it has started, `tail` the last of them."""

    number: int
    stage: Stage
    doing: str
    for_s: float
    launches: int
    tail: str
    pid: int
    host: str
    place: str
    time: float

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Beat:
        """What `encode` made."""
        return Beat(**json.loads(data))


@dataclasses.dataclass
class Peer:
    """Another process as seen from here: its last beat and when it was heard (monotonic)."""

    heard: float
    beat: Beat | None = None

    def update(self, data: bytes, now: float) -> None:
        """Take in what the process last said."""
        beat = Beat.decode(data)
        if self.beat is None or beat.number != self.beat.number:
            self.beat, self.heard = beat, now

    def silent_s(self, now: float) -> float:
        """Seconds since it was last heard."""
        return now - self.heard

    def fate(self) -> str:
        """Of a process on this machine: "running", "stopped", "ended"; "unknown" elsewhere."""
        if self.beat is None or self.beat.place != place():
            return "unknown"
        return process_state(self.beat.pid)


def process_state(pid: int) -> str:
    """ "running", "stopped" or "ended": what this machine knows of a process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "ended" if os.path.isdir("/proc/self") else "unknown"
    return {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}.get(state, "running")


@functools.cache
def place() -> str:
    """What tells this machine, and this space of process numbers, from others."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id",):
        try:
            with open(path, encoding="ascii") as file:
                parts.append(file.read().strip())
        except OSError:
            parts.append("")
    try:
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    except OSError:
        parts.append("")
    return "/".join(parts)


def make_beat(number: int, state: Any, launches: int, tail: str) -> Beat:
    """This process's sign of life; `state` has stage, doing and since (monotonic)."""
    return Beat(
        number=number,
        stage=state.stage,
        doing=state.doing,
        for_s=round(time.monotonic() - state.since, 1),
        launches=launches,
        tail=tail,
        pid=os.getpid(),
        host=socket.gethostname(),
        place=place(),
        time=time.time(),
    )

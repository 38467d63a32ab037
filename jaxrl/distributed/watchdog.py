"""The thread that notices when the processes of a job no longer go on together, and says why.

Each process publishes a sign of life and reads those of the others. What it finds becomes an error
in the main thread as soon as that is in Python; a main thread that is stuck in a collective cannot
see it, so after a grace period the report is written and the process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from jaxrl.distributed.beats import Beat, Peer, Stage, make_beat
from jaxrl.distributed.control import Control, Left, departures
from jaxrl.distributed.sequence import COMPARED, Sequence, Tail, decode_tail, first_difference
from jaxrl.distributed.sides import name_processes
from jaxrl.distributed.witness import Witness
from jaxrl.errors import CollectiveOrderError, DistributedError, HangError
from jaxrl.observe.logger import get_logger

_LOGGER = get_logger("distributed")

_BEATS_PER_S = 50
"""Beats of all processes together that each of them reads in a second, at most."""
_EXCHANGE_S = 3.0
"""How long others may take to say all that they have started, once it differs."""

EXIT_WATCHDOG = 3
"""Exit code of a process that the watchdog ended."""


@dataclasses.dataclass(frozen=True)
class Watch:
    """Times of the watchdog in seconds.

    Without progress for `report_after_s` inside a program a report is written; after `exit_after_s`
    the job ends. A process that is silent for `dead_after_s` counts as lost. Whatever is found, the
    main thread has `grace_s` to end in good order before the process is ended.
    """

    heartbeat_s: float = 1.0
    report_after_s: float = 120.0
    exit_after_s: float = 900.0
    dead_after_s: float = 30.0
    grace_s: float = 10.0


@dataclasses.dataclass(frozen=True)
class State:
    """What the main thread is doing, since when (monotonic)."""

    stage: Stage
    doing: str
    since: float


class Watchdog:
    """Watches one process's peers; `start` begins, `stop` ends.

    `failure` is what was found, None as long as all is well.
    """

    def __init__(self, control: Control, sequence: Sequence, watch: Watch, logs: Path | None):
        self._control, self._sequence, self._watch = control, sequence, watch
        self.logs = logs
        now = time.monotonic()
        self.state = State("idle", "start-up", now)
        self.failure: DistributedError | None = None
        others = [p for p in range(control.count) if p != control.index]
        self._peers = {p: Peer(heard=now) for p in others}
        self._left: dict[int, Left] = {}
        self._beats = 0
        self._reported_at = 0.0
        self._failed_at = self._reached_at = now
        self._stopping = threading.Event()
        self._witness: Witness | None = None
        self._thread = threading.Thread(target=self._run, name="jaxrl-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._witness = Witness(f"process {self._control.index} (pid {os.getpid()})")
        self._thread.start()

    def stop(self) -> None:
        """End; the thread does nothing any more when this returns."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        if self._witness is not None:
            self._witness.dismiss()

    def now(self, stage: Stage, doing: str) -> None:
        """The main thread does something else: progress."""
        self.state = State(stage, doing, time.monotonic())

    def check(self) -> None:
        """Raise what was found, if anything."""
        if self.failure is not None:
            raise self.failure

    def describe(self, process: int) -> str:
        """What `process` was last seen doing, in words."""
        if process == self._control.index:
            return self._words(process, self._own())
        peer = self._peers[process]
        now = time.monotonic()
        if peer.beat is None:
            return f"process {process}: never heard"
        words = self._words(process, peer.beat)
        fate = peer.fate()
        if process in self._left:
            return f"{words}; has left the job"
        if fate in ("stopped", "ended"):
            return f"{words}; {fate}"
        silent = peer.silent_s(now)
        return f"{words}; silent for {silent:.0f} s" if silent > self._quiet_s else words

    def explain(self, wait_s: float) -> str:
        """Why others may be the cause of an error here: looks for up to `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            if self.failure is not None and not isinstance(self.failure, HangError):
                return str(self.failure)
            with contextlib.suppress(Exception):
                self._listen()
            lost = self._lost(patience=min(self._watch.dead_after_s, wait_s))
            if lost is not None:
                return str(lost)
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.1)

    @property
    def _quiet_s(self) -> float:
        return 3 * max(self._watch.heartbeat_s, self._control.count / _BEATS_PER_S) + 1

    def _words(self, process: int, beat: Beat) -> str:
        verb = {"idle": "outside of programs", "running": "in"}.get(beat.stage, beat.stage)
        return (
            f"process {process} ({beat.host}, pid {beat.pid}): {verb} {beat.doing} "
            f"for {beat.for_s:.0f} s, {beat.launches} launches"
        )

    def _own(self) -> Beat:
        return make_beat(self._beats, self.state, self._sequence.count, self._sequence.encode())

    def _run(self) -> None:
        # Everybody reads what everybody says: in a large job less often.
        beat_s = max(self._watch.heartbeat_s, self._control.count / _BEATS_PER_S)
        while not self._stopping.wait(beat_s):
            try:
                self._tick()
            except Exception:
                _LOGGER.exception("the watchdog failed; it goes on")

    def _tick(self) -> None:
        now = time.monotonic()
        try:
            self._beats += 1
            own = self._own()
            self._control.put(f"beat/{self._control.index}", own.encode())
            self._listen()
            self._reached_at = time.monotonic()
        except Exception as error:  # jaxlib's, of many kinds
            own = self._own()
            if now - self._reached_at > self._watch.dead_after_s:
                first = (str(error).splitlines() or [""])[0][:200]
                self._fail(DistributedError(f"the coordinator cannot be reached: {first}"))
        if self._witness is not None:
            self._witness.tell(self._everyone(), self._report_path)
        if self.failure is None:
            found = self._judge(own)
            if found is not None:
                self._fail(found)
        if self.failure is not None and time.monotonic() - self._failed_at > self._watch.grace_s:
            self._end(str(self.failure))

    def _listen(self) -> None:
        now = time.monotonic()
        for process, data in self._control.folder("beat").items():
            if process in self._peers:
                self._peers[process].update(data, now)
        self._left = self._control.left()

    def _judge(self, own: Beat) -> DistributedError | None:
        beats = {p: peer.beat for p, peer in self._peers.items() if peer.beat is not None}
        tails = {p: decode_tail(beat.tail) for p, beat in beats.items()}
        known = {number for tail in tails.values() for number in tail}
        mine = self._sequence.tail(COMPARED)
        tails[self._control.index] = {n: mine[n] for n in known if n in mine}
        different = first_difference(tails)
        if different is None:
            different = self._ends_early(own, beats)
        else:
            different = self._where_it_began(tails) or different
        if different is not None:
            return CollectiveOrderError(f"{different}; {self._everyone()}")
        return self._lost(self._watch.dead_after_s) or self._hangs(own)

    def _where_it_began(self, tails: Mapping[int, Tail]) -> str | None:
        """The first difference in all that is remembered; the others look for it too."""
        self._control.put(f"tail/{self._control.index}", self._sequence.encode_all().encode())
        deadline = time.monotonic() + _EXCHANGE_S
        while True:
            full = {
                p: decode_tail(data.decode()) for p, data in self._control.folder("tail").items()
            }
            if len(full) == self._control.count or time.monotonic() > deadline:
                return first_difference({**tails, **full})
            time.sleep(0.1)

    def _ends_early(self, own: Beat, beats: Mapping[int, Beat]) -> str | None:
        """Whether some have ended although others have started more programs than they."""
        everyone = {**beats, self._control.index: own}
        most = max(beat.launches for beat in everyone.values())
        short = {p: b for p, b in everyone.items() if b.stage == "closing" and b.launches < most}
        if not short:
            return None
        counts = ", ".join(f"{b.launches} in process {p}" for p, b in sorted(everyone.items()))
        return f"{name_processes(short)} ended with fewer launches than others: {counts}"

    def _lost(self, patience: float) -> DistributedError | None:
        """Whether a process is gone, or has left with an error."""
        own = self._control.index
        failed = {p: left for p, left in self._left.items() if left.reason and p != own}
        if failed:
            return DistributedError(departures(failed))
        now = time.monotonic()
        for process, peer in self._peers.items():
            if process in self._left:
                continue
            if peer.fate() == "ended":
                return DistributedError(
                    f"process {process} has ended without a word (killed?); {self._everyone()}"
                )
            if peer.silent_s(now) > patience:
                stopped = "it is stopped" if peer.fate() == "stopped" else "dead or cut off"
                return DistributedError(
                    f"no sign of life of process {process} for {peer.silent_s(now):.0f} s "
                    f"({stopped}); {self._everyone()}"
                )
        return None

    def _hangs(self, own: Beat) -> DistributedError | None:
        if own.stage in ("idle", "compiling"):
            return None
        text = f"no progress for {own.for_s:.0f} s: {self._late(own)}; {self._everyone()}"
        if own.for_s > self._watch.exit_after_s:
            return HangError(text)
        due = self._reported_at + self._watch.report_after_s
        if own.for_s > self._watch.report_after_s and time.monotonic() > due:
            self._reported_at = time.monotonic()
            self._report(text)
        return None

    def _late(self, own: Beat) -> str:
        """Who waits, and for whom."""
        launches = {p: peer.beat.launches for p, peer in self._peers.items() if peer.beat}
        launches[self._control.index] = own.launches
        most = max(launches.values())
        late = {p for p in range(self._control.count) if launches.get(p, -1) < most}
        if not late:
            return "all processes are at the same launch"
        waiting = name_processes(set(launches) - late)
        return f"{waiting} at launch {most}, {name_processes(late)} never arrived there"

    def _everyone(self) -> str:
        return "; ".join(self.describe(process) for process in range(self._control.count))

    def _fail(self, error: DistributedError) -> None:
        self.failure, self._failed_at = error, time.monotonic()

    def _report(self, text: str) -> None:
        _LOGGER.error("%s", text)
        path = self._report_path
        if path is None:
            return
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\n")
        except OSError as error:
            _LOGGER.error("cannot write %s: %s", path, error)

    @property
    def _report_path(self) -> Path | None:
        return self.logs and self.logs / f"hang.process{self._control.index}.txt"

    def _end(self, text: str) -> None:
        """The main thread does not come back: say why, and end the process."""
        self._report(text)
        if self._witness is not None:
            self._witness.dismiss()
        with contextlib.suppress(Exception):
            self._control.leave(text, follows=type(self.failure) is DistributedError)
        sys.stderr.write(f"jaxrl: error: {text}\n")
        sys.stderr.flush()
        logging.shutdown()
        os._exit(EXIT_WATCHDOG)

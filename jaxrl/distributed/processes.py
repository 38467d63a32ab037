"""`Processes`: the processes of a job as one of them sees it."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from jax.sharding import Mesh

from jaxrl.distributed import connection, groups
from jaxrl.distributed.checked import Checked
from jaxrl.distributed.collectives import Collectives
from jaxrl.distributed.control import Control
from jaxrl.distributed.order import Fingerprint, agree, fingerprint
from jaxrl.distributed.record import record_program
from jaxrl.distributed.sequence import Sequence, decode_tail, first_difference
from jaxrl.distributed.watchdog import Watch, Watchdog
from jaxrl.errors import CollectiveOrderError, ConfigError, DataError, DistributedError
from jaxrl.observe.logger import get_logger

_LOGGER = get_logger("distributed")
_EXPLAIN_S = 5.0
"""How long an error waits to learn whether another process is its cause."""


class Processes:
    """Use as a context: leaving it in good order waits for all, an exception tells the others.

    `index` is the number of this process, `count` how many there are. Alone, everything that
    compares or waits does nothing.
    """

    def __init__(
        self,
        control: Control | None,
        facts: Mapping[str, str],
        watch: Watch,
        logs: Path | str | None,
        agree_timeout_s: float,
    ):
        self.index = 0 if control is None else control.index
        self.count = 1 if control is None else control.count
        self.closed = False
        self._control, self._facts = control, dict(facts)
        self._timeout_s = agree_timeout_s
        self._logs = None if logs is None else Path(logs)
        self._sequence = Sequence()
        self._watchdog: Watchdog | None = None
        if control is not None:
            self._watchdog = Watchdog(control, self._sequence, watch, self._logs)
            control.may_wait, control.describe = self._watchdog.check, self._watchdog.describe
        self._step, self._agreed, self._verified = "", 0, 0
        self._last_words: Callable[[], None] | None = None

    @classmethod
    def alone(cls, facts: Mapping[str, str], logs: Path | str | None) -> Processes:
        """The only process of a job."""
        return cls(None, facts, Watch(), logs, 0.0)

    def start(self, timeout_s: float) -> None:
        """Wait until all are connected, and begin to watch."""
        if self._control is not None and self._watchdog is not None:
            self._watchdog.start()
            self._control.gather("joined", b"", timeout_s=timeout_s, waiting_for="all to connect")

    @property
    def first(self) -> bool:
        """Whether this is process 0, which does what has to be done once."""
        return self.index == 0

    def set_logs(self, folder: Path | str) -> None:
        """Where reports and the list of collectives go from now on."""
        self._logs = Path(folder)
        if self._watchdog is not None:
            self._watchdog.logs = self._logs

    def checked(self, jitted: Any, *, name: str) -> Any:
        """`jitted`, whose programs all processes compare before they first run (see `Checked`).

        Alone and without a folder for logs it is returned as it is.
        """
        if self._control is None and self._logs is None:
            return jitted
        return Checked(jitted, name, self, self._facts)

    def agree(self, name: str, program: Any, inputs: Any = ()) -> None:
        """Compare a compiled program (or its HLO text) that is not called through `checked`.

        `inputs` is the tree of its arguments, or of `jax.ShapeDtypeStruct`. Raises as `checked`.
        """
        if self._control is not None or self._logs is not None:
            self.compiled(fingerprint(name, program, inputs, self._facts), program)

    def enter(self, name: str, *, step: int | None = None) -> None:
        """This process begins `name`; `step` becomes part of what is compared from here on.

        Raises what the watchdog has found.
        """
        self._step = "" if step is None else f" step {step}"
        if self._watchdog is not None:
            self._watchdog.check()
            self._watchdog.now("running", f"{name!r}{self._step}")

    def idle(self, doing: str = "") -> None:
        """This process does something of its own, which may take any time."""
        if self._watchdog is not None:
            self._watchdog.check()
            self._watchdog.now("idle", doing)

    def verify(self, what: str = "verification") -> None:
        """Wait for all, and raise `CollectiveOrderError` unless all have started the same programs.

        Before numbers leave the job (a checkpoint, a published version): until then they may come
        from programs that were paired wrongly.
        """
        if self._control is None:
            return
        watchdog = self._watchdog
        assert watchdog is not None
        watchdog.check()
        watchdog.now("agreeing", f"{what!r}")
        self._sequence.append(f"{what!r}")
        self._compare_sequences(f"verify/{self._verified}", what)
        self._verified += 1
        watchdog.now("idle", f"{what!r} done")

    def group(self, mesh: Mesh, axes: str | tuple[str, ...]) -> groups.Group:
        """The processes that share the other coordinates of `mesh` with this one along `axes`."""
        return groups.process_group(mesh, axes, self.index)

    def collectives(self, group: groups.Group, *, timeout_s: float | None = None) -> Collectives:
        """Collectives of small host values over `group`."""
        return Collectives(self._control, group, timeout_s or self._timeout_s or 600.0)

    def exchange(self, what: str, value: bytes, *, timeout_s: float = 3600.0) -> list[bytes]:
        """What every process gives at `what`, in their order: some kilobytes, through the store,
        so that devices go on meanwhile.

        Raises `CollectiveOrderError` if others are at another exchange, `HangError` if some do not
        come within `timeout_s`, and `DistributedError` if one has left the job.
        """
        if self._control is None or self._watchdog is None:
            return [value]
        self._watchdog.check()
        self._watchdog.now("idle", f"at the exchange of {what!r}")
        number = self._control.next_call("exchange")
        got = self._control.gather(
            f"exchange/{number}",
            f"{what}\n".encode() + value,
            timeout_s=timeout_s,
            waiting_for=f"all to reach {what!r}",
        )
        if number:
            # All are at this exchange, so that nobody reads the one before any more.
            self._control.forget(f"exchange/{number - 1}")
        # It waits for nobody any more: others may wait for what it does next.
        self._watchdog.now("idle", f"after the exchange of {what!r}")
        parts = [got[process].partition(b"\n") for process in range(self.count)]
        places = {process: place.decode() for process, (place, _, _) in enumerate(parts)}
        if len(set(places.values())) > 1:
            told = "; ".join(f"process {p} is at {place!r}" for p, place in places.items())
            raise CollectiveOrderError(f"exchange {number}: {told}")
        return [rest for _, _, rest in parts]

    # What a checked function asks for.

    def starting(self, entry: str) -> None:
        """A checked program is about to start."""
        watchdog = self._watchdog
        if watchdog is None:
            return
        if watchdog.failure is not None:
            raise watchdog.failure
        entry += self._step
        self._sequence.append(entry)
        watchdog.now("running", entry)

    def compiling(self, name: str) -> None:
        """A checked program is about to be compiled."""
        if self._watchdog is not None:
            self._watchdog.now("compiling", f"{name!r}{self._step}")

    def compiled(self, mine: Fingerprint, program: Any) -> None:
        """All processes compare what they have compiled."""
        if self._logs is not None and self.first:
            record_program(self._logs, mine.name, program, mine.inputs)
        if self._control is None or self._watchdog is None:
            return
        self._watchdog.check()
        self._sequence.append(f"first run of {mine.name!r} with {_short(mine.inputs)}{self._step}")
        self._watchdog.now("agreeing", f"first run of {mine.name!r}{self._step}")
        agree(self._control, mine, number=self._agreed, timeout_s=self._timeout_s)
        self._agreed += 1

    def _compare_sequences(self, tag: str, what: str) -> None:
        assert self._control is not None
        mine = json.dumps([self._sequence.count, self._sequence.encode()]).encode()
        waiting_for = f"all to reach {what!r}"
        got = self._control.gather(tag, mine, timeout_s=self._timeout_s, waiting_for=waiting_for)
        said = {process: json.loads(data) for process, data in got.items()}
        different = first_difference({p: decode_tail(tail) for p, (_, tail) in said.items()})
        if different is not None:
            full = self._control.gather(
                f"{tag}/all",
                self._sequence.encode_all().encode(),
                timeout_s=self._timeout_s,
                waiting_for=waiting_for,
            )
            tails = {p: decode_tail(data.decode()) for p, data in full.items()}
            different = first_difference(tails) or different
        counts = {p: count for p, (count, _) in said.items()}
        if different is None and len(set(counts.values())) > 1:
            told = ", ".join(f"{count} in process {p}" for p, count in sorted(counts.items()))
            different = f"processes have made different numbers of launches: {told}"
        if different is not None:
            raise CollectiveOrderError(different)

    # The end.

    def close(self) -> None:
        """Wait until all have done all their work, compare it, and disconnect. May be repeated.

        Raises `CollectiveOrderError` if some have started other or fewer programs, `HangError` and
        `DistributedError` if some do not come.
        """
        if self.closed:
            return
        if self._control is not None and self._watchdog is not None:
            self._watchdog.check()
            self._watchdog.now("closing", "the end")
            self._compare_sequences("closing", "the end")
            self._watchdog.stop()
            self._control.leave()
            connection.disconnect()
        self.closed = True

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process leaves, and learn whether one of them is the cause."""
        if self.closed:
            return
        self.closed = True
        if self._control is None or self._watchdog is None:
            return
        # Only an error of communication can have its cause in another process.
        cause = self._watchdog.explain(_EXPLAIN_S) if _of_communication(error) else ""
        self._watchdog.stop()
        text = " ".join(str(error).split())
        reason = f"{type(error).__name__}: {text}"[:500]
        follows = bool(cause) or type(error) is DistributedError
        try:
            self._control.leave(f"{reason} ({cause})" if cause else reason, follows=follows)
        except Exception as gone:  # the coordinator may be what was lost
            _LOGGER.error("the others cannot be told: %s", (str(gone).splitlines() or [""])[0])
        if cause and cause not in str(error):
            error.add_note(f"jaxrl: {cause}")
            _LOGGER.error("%s", cause)
        connection.abandon()
        atexit.register(_leave_at_once, _exit_code(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            try:
                self.close()
            except BaseException as late:
                self.fail(late)
                raise
        elif isinstance(error, SystemExit) and not error.code:
            self.close()
        else:
            self.fail(error)


def _of_communication(error: BaseException) -> bool:
    """Whether `error` may come from a collective whose other side is gone."""
    return isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, Exception) and "Gloo" in str(error)
    )


def _short(inputs: tuple[str, ...]) -> str:
    """Inputs in a few words that differ where they differ."""
    digest = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:8]
    last = inputs[-1] if inputs else "no inputs"
    return f"inputs {digest} (the last of {len(inputs)}: {last})"


def _exit_code(error: BaseException) -> int:
    """As `jaxrl` on the command line has it."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return 128 + getattr(error, "signum", signal.SIGINT)
    return 2 if isinstance(error, ConfigError | DataError) else 1


def _leave_at_once(code: int) -> None:
    """JAX's own end would wait for processes that are gone, and then abort."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

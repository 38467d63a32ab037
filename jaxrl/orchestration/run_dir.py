"""The one directory that a run writes to: its layout, its lock, and what each update trained on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxrl.errors import OutputError
from jaxrl.observe.logger import get_logger
from jaxrl.orchestration.trajectories import decode_trajectories, encode_trajectories
from jaxrl.types import TrajectoryGroup

_LOGGER = get_logger("orchestration")
_PROBE_BYTES = 1 << 20


class RunDir:
    """Paths of a run; `acquire` (or `with`) makes it this process's to write to.

    Making the object touches nothing, so readers need no lock.
    """

    def __init__(self, output_dir: Path | str):
        self.path = Path(output_dir)
        self.config = self.path / "config.json"
        self.ledger = self.path / "ledger.jsonl"
        self.metrics = self.path / "metrics"
        self.weights = self.path / "weights"
        self.checkpoints = self.path / "checkpoints"
        self.trajectories = self.path / "trajectories"
        self.plots = self.path / "plots"
        self.logs = self.path / "logs"
        self._lock: BinaryIO | None = None
        self._mark = self.path / ".mark"

    @property
    def folders(self) -> tuple[Path, ...]:
        """The subdirectories."""
        return (
            self.metrics,
            self.weights,
            self.checkpoints,
            self.trajectories,
            self.plots,
            self.logs,
        )

    def acquire(self) -> RunDir:
        """Create the layout, lock it, and prove by writing that it can be written.

        Raises `OutputError` naming path and rule: another run inside, no permission, a full disk.
        """
        _attempt(
            self.path, "create the directory", lambda: self.path.mkdir(parents=True, exist_ok=True)
        )
        try:
            self._take_lock()
            for folder in self.folders:
                _attempt(folder, "create the directory", lambda f=folder: f.mkdir(exist_ok=True))
                _probe(folder)
        except BaseException:
            self.release()
            raise
        return self

    def release(self) -> None:
        """Let other runs in; may be repeated."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunDir:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def leave_mark(self) -> bytes:
        """Write something unique into the folder, for `find_mark` of the run's other processes."""
        mark = uuid.uuid4().hex.encode()
        write_atomically(self._mark, mark)
        return mark

    def find_mark(self, mark: bytes, *, wait_s: float = 10.0) -> None:
        """Raise `OutputError` unless `mark` was left in this very folder.

        Network file systems may show it a little later: it is looked for again for `wait_s`.
        """
        deadline = time.monotonic() + wait_s
        while not self._has_mark(mark):
            if time.monotonic() > deadline:
                raise OutputError(
                    f"{self.path} on {socket.gethostname()} ({self.path.absolute()}) is not the "
                    "folder that process 0 writes to: output_dir must be one that all processes see"
                )
            time.sleep(0.1)

    def _has_mark(self, mark: bytes) -> bool:
        try:
            return self._mark.read_bytes() == mark
        except OSError:
            return False

    def ledger_of(self, process: int) -> Path:
        """Where a process of the run writes its events; the first one's is the run's."""
        return self.path / f"ledger.process-{process}.jsonl" if process else self.ledger

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json; one that differs stays beside it as config.1.json, config.2.json, …"""
        data = (json.dumps(config, indent=2, default=str) + "\n").encode()
        if self.config.exists() and self.config.read_bytes() != data:
            number = 1
            while (older := self.path / f"config.{number}.json").exists():
                number += 1
            os.replace(self.config, older)
        write_atomically(self.config, data)

    def write_trajectories(
        self, update: int, groups: Sequence[TrajectoryGroup], digests: Mapping[int, str]
    ) -> Path:
        """Keep what update `update` trains on, with version number -> digest. Returns the path."""
        path = self.trajectories_of(update)
        write_atomically(path, encode_trajectories(update, groups, digests))
        return path

    def read_trajectories(self, update: int) -> tuple[list[TrajectoryGroup], dict[int, str]]:
        """What `write_trajectories` kept: the groups, bit for bit, and version -> digest.

        Raises `DataError` if there is no such file or it is not one of ours.
        """
        return decode_trajectories(self.trajectories_of(update))

    def updates_with_trajectories(self) -> list[int]:
        """The updates whose trajectories are kept, in order."""
        names = (path.stem for path in self.trajectories.glob("update_*.npz"))
        return sorted(int(name.removeprefix("update_")) for name in names)

    def trajectories_of(self, update: int) -> Path:
        """Where the trajectories of an update are."""
        return self.trajectories / f"update_{update:08d}.npz"

    def _take_lock(self) -> None:
        path = self.path / ".lock"
        # Unbuffered append: opening must not wipe the entry of the run that holds the lock.
        lock = _attempt(path, "open the lock file", lambda: path.open("a+b", buffering=0))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read(200).decode(errors="replace").strip()
            lock.close()
            raise OutputError(
                f"{self.path} is in use by another run ({holder}); one run writes to a directory "
                "at a time: stop it, or choose another output_dir"
            ) from error
        except OSError as error:
            # Some network file systems have no locks; refusing to run there would help nobody.
            _LOGGER.warning("%s cannot be locked (%s): do not start two runs in it", path, error)
        self._lock = lock
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()} since {started}\n"
        lock.truncate(0)
        _attempt(path, "write the lock file", lambda: lock.write(holder.encode()))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is complete or not there, also after a kill. Raises `OutputError`."""
    part = path.with_name(f".{path.name}.part")

    def write() -> None:
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    _attempt(path, "write the file", write)


def _probe(folder: Path) -> None:
    """Write a mebibyte and take it away again: permissions alone do not show a full disk."""
    path = folder / ".probe"

    def write() -> None:
        try:
            with path.open("wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            path.unlink(missing_ok=True)

    _attempt(folder, f"write {_PROBE_BYTES} bytes in", write)


def _attempt(path: Path, action: str, call: Any) -> Any:
    """call(), with an `OSError` turned into an `OutputError` that says what has to hold."""
    try:
        return call()
    except OSError as error:
        rule = {
            errno.ENOSPC: "the disk is full; free some space",
            errno.EDQUOT: "the disk quota is used up",
            errno.EROFS: "the file system is read-only",
            errno.EACCES: "this user needs permission to write there",
            errno.EPERM: "this user needs permission to write there",
            errno.ENOTDIR: "a part of the path is a file",
            errno.EEXIST: "a file stands in the way",
        }.get(error.errno or 0, "choose an output_dir that can be written")
        raise OutputError(f"cannot {action} {path}: {error.strerror or error} ({rule})") from error

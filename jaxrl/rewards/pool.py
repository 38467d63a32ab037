"""A pool of processes that score completions, each within a time limit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import pickle
import queue
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import cloudpickle

from jaxrl.errors import ConfigError, RewardError
from jaxrl.rewards.process import RewardResult, WorkerProcess
from jaxrl.rewards.scorers import Scorer, check_scorer, load_scorer
from jaxrl.types import Completion

_CLOSED = "the reward pool is closed"


class RewardPool:
    """Scores completions in `workers` processes; a hanging or dying scorer costs one item only.

    >>> with RewardPool("exact", workers=2, timeout_s=5.0) as pool:  # doctest: +SKIP
    ...     result = asyncio.run(pool.score(completion, {"answer": "olleh"}))

    Each process is looked after by a thread, so `score` may be awaited on any event loop and never
    blocks it. Processes end with the pool, with the interpreter, and soon after a killed parent.
    """

    def __init__(
        self,
        scorer: str | Scorer,
        *,
        workers: int = 1,
        timeout_s: float = 5.0,
        start_timeout_s: float = 60.0,
    ):
        """`scorer`: a name for `load_scorer`, or a function.

        A function of a notebook or of the main program is sent by value, with the globals that it
        uses; others are imported by the processes. Raises `ConfigError`.
        """
        if workers < 1:
            raise ConfigError(f"rewards.workers={workers} must be at least 1")
        if not timeout_s > 0 or not start_timeout_s > 0:
            raise ConfigError(
                f"rewards.timeout_s={timeout_s} and start_timeout_s={start_timeout_s} "
                "must be above 0"
            )
        if isinstance(scorer, str):
            scorer = load_scorer(scorer)
        check_scorer(scorer, "the scorer")
        try:
            pickled = cloudpickle.dumps(scorer)
        except Exception as error:
            raise ConfigError(
                f"the scorer {scorer!r:.80} cannot be sent to another process: {error}"
            ) from error
        self._shared = _Shared(pickled, timeout_s, start_timeout_s)
        self._workers = workers
        # The threads hold `_Shared`, not the pool: one that nobody keeps is collected and closed.
        self._finalizer = weakref.finalize(self, _Shared.close, self._shared)

    def start(self) -> RewardPool:
        """Start the processes and wait until they have the scorer; may be repeated.

        Blocks for about the time that the scorer's imports take. Raises `RewardError` if a process
        cannot load the scorer.
        """
        shared = self._shared
        if shared.closed:
            raise RewardError(_CLOSED)
        if shared.threads:
            return self
        ready: list[concurrent.futures.Future[None]] = []
        for index in range(self._workers):
            ready.append(concurrent.futures.Future())
            thread = threading.Thread(
                target=_serve, args=(shared, ready[-1]), name=f"reward-{index}", daemon=True
            )
            shared.threads.append(thread)
            thread.start()
        try:
            for future in ready:
                future.result()
        except BaseException:
            self.close()
            raise
        return self

    async def score(self, completion: Completion, reference: Mapping[str, Any]) -> RewardResult:
        """The reward, or how scoring failed. Items wait their turn; waiting counts to no limit.

        A cancelled item that has not started is dropped; one that has runs to its end.
        Raises `RewardError` if the pool is not running or is closed meanwhile.
        """
        job = _Job(completion, reference)
        self._shared.submit(job)
        return await asyncio.wrap_future(job.future)

    @property
    def counts(self) -> dict[str, int]:
        """Items so far by outcome: "ok", "timeout", "error"."""
        with self._shared.lock:
            return dict(self._shared.counts)

    @property
    def pids(self) -> list[int]:
        """Process ids of the reward processes."""
        with self._shared.lock:
            return [worker.pid for worker in self._shared.running]

    def close(self) -> None:
        """Kill the processes; items not scored yet raise `RewardError`. May be repeated."""
        self._finalizer()

    def __enter__(self) -> RewardPool:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclasses.dataclass(eq=False)
class _Job:
    completion: Completion
    reference: Mapping[str, Any]
    future: concurrent.futures.Future[RewardResult] = dataclasses.field(
        default_factory=concurrent.futures.Future
    )


class _Shared:
    """What the pool and its threads have in common."""

    def __init__(self, scorer: bytes, timeout_s: float, start_timeout_s: float):
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.counts = {"ok": 0, "timeout": 0, "error": 0}
        self.running: list[WorkerProcess] = []
        self.threads: list[threading.Thread] = []
        self.closed = False
        self._make = lambda: WorkerProcess(
            scorer, timeout_s=timeout_s, start_timeout_s=start_timeout_s
        )

    def submit(self, job: _Job) -> None:
        """Queue a job. Raises `RewardError` if nobody would ever take it."""
        # Under the lock: a job queued after `close` has emptied the queue would wait for ever.
        with self.lock:
            if self.closed:
                raise RewardError(_CLOSED)
            if not self.threads:
                raise RewardError("the reward pool is not started; call start()")
            self.jobs.put(job)

    def spawn(self) -> WorkerProcess:
        """A process that is ready. Raises `RewardError`."""
        try:
            worker = self._make()
        except OSError as error:
            raise RewardError(f"a reward process cannot be started: {error}") from error
        try:
            # `close` kills every registered process, and after it none is registered. Not started
            # under the lock, which `submit` takes on the event loop.
            with self.lock:
                if self.closed:
                    raise RewardError(_CLOSED)
                self.running.append(worker)
            worker.wait_ready()
        except BaseException:
            self.discard(worker)
            raise
        return worker

    def discard(self, worker: WorkerProcess) -> None:
        """Kill a process and forget it."""
        worker.dispose()
        with self.lock, contextlib.suppress(ValueError):
            self.running.remove(worker)

    def finish(self, job: _Job, result: RewardResult) -> None:
        """Deliver a result and count it, unless it only shows that the pool was closed."""
        if self.closed and result.outcome != "ok":
            job.future.set_exception(RewardError(_CLOSED))
            return
        with self.lock:
            self.counts[result.outcome] += 1
        job.future.set_result(result)

    def close(self) -> None:
        """Kill all processes and end the threads, within a few seconds."""
        with self.lock:
            self.closed = True
            workers = list(self.running)
        for worker in workers:
            worker.kill()
        for _ in self.threads:
            self.jobs.put(None)
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)
        with contextlib.suppress(queue.Empty):
            while True:
                job = self.jobs.get_nowait()
                if job is not None and job.future.set_running_or_notify_cancel():
                    job.future.set_exception(RewardError(_CLOSED))


def _serve(shared: _Shared, ready: concurrent.futures.Future[None]) -> None:
    """Body of a thread: keep one process running and give it one job after the other."""
    worker: WorkerProcess | None = None
    try:
        worker = shared.spawn()
    except BaseException as error:
        ready.set_exception(error)
        return
    ready.set_result(None)
    while (job := shared.jobs.get()) is not None:
        if not job.future.set_running_or_notify_cancel():
            continue
        try:
            worker = _run(shared, worker, job)
        except BaseException as error:
            # A mistake of ours must reach whoever waits: this thread is their only hope.
            if not job.future.done():
                job.future.set_exception(RewardError(f"scoring failed: {error!r}"))
            if worker is not None:
                shared.discard(worker)
            worker = None
    if worker is not None:
        shared.discard(worker)


def _run(shared: _Shared, worker: WorkerProcess | None, job: _Job) -> WorkerProcess | None:
    """Score one job, in a new process if the last is gone; returns the one to go on with."""
    try:
        item = pickle.dumps((job.completion, job.reference), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        detail = f"the item cannot be sent to a reward process: {type(error).__name__}: {error}"
        shared.finish(job, RewardResult(None, "error", detail))
        return worker
    try:
        worker, result = _score(shared, worker, item)
    except RewardError as error:
        shared.finish(job, RewardResult(None, "error", str(error)))
        return None
    if worker.usable:
        shared.finish(job, result)
        return worker
    # Killed before the result is delivered: a hanging scorer must not outlive its verdict.
    shared.discard(worker)
    shared.finish(job, result)
    # Replaced at once, so that the next item need not wait for the start.
    with contextlib.suppress(RewardError):
        return shared.spawn()
    return None


def _score(
    shared: _Shared, worker: WorkerProcess | None, item: bytes
) -> tuple[WorkerProcess, RewardResult]:
    """Score in `worker`; a process that was dead before the item started is replaced once.

    Raises `RewardError` if no process can be started.
    """
    if worker is not None:
        result = worker.score(item)
        if worker.usable or worker.started:
            return worker, result
        shared.discard(worker)
    worker = shared.spawn()
    return worker, worker.score(item)

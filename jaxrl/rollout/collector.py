"""Keeps episodes running under the staleness bound and hands out whole groups.

Two threads meet here. The collector's own thread runs an event loop with all episodes; the
trainer's thread calls `next_batch` and `set_version`. What both touch is guarded by one condition,
held for moments only and never across an `await`, a call of user code or a write of the ledger.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxrl.errors import DataError, DeadlineError, RolloutError
from jaxrl.observe.logger import get_logger
from jaxrl.rollout.counts import Counts
from jaxrl.rollout.episodes import EpisodeRunner, group_fields, retrieve
from jaxrl.rollout.frontier import Frontier
from jaxrl.rollout.staleness import StalenessController, oldest_version
from jaxrl.rollout.workflow import Workflow
from jaxrl.types import Prompt, Rejected, Sampler, TrajectoryGroup

_LOGGER = get_logger("rollout")
_CANCEL_GRACE_S = 2.0
"""How long episodes may take to end after they were cancelled at closing."""


class Prompts(Protocol):
    """Anything indexable; `IndexError` says that there are no more."""

    def __getitem__(self, index: int) -> Prompt:
        """The prompt at `index` >= 0."""


class Collector:
    """Dispatches groups in prompt order, gathers them by id, repeats what was lost.

    Use as a context manager, or `start()` and `close()`. An error in an episode, in the prompts or
    in the ledger callback ends the collection: `next_batch` raises it, at once and ever after.
    """

    def __init__(
        self,
        sampler: Sampler,
        workflow: Workflow,
        prompts: Prompts,
        *,
        controller: StalenessController,
        group_size: int,
        run_seed: int,
        frontier: Mapping[str, Any] | None = None,
        share: tuple[int, int] = (0, 1),
        ledger: Callable[..., Any] | None = None,
        episode_timeout_s: float = 120.0,
        max_retries: int = 2,
    ):
        """`ledger(event, **fields)` is told of "dispatched", "accepted", "rejected", "dropped".

        `frontier` continues where `frontier()` of an earlier collector stood. Of `share[1]`
        collectors this one takes the prompts `share[0]`, `share[0]` + `share[1]`, … Episodes wait
        for free slots of the driver within `episode_timeout_s`.
        """
        controller.check_group(group_size)
        self._prompts = prompts
        self._controller = controller
        self._group_size = group_size
        self._frontier = Frontier(frontier, first=share[0], step=share[1])
        self._record = ledger or (lambda event, **fields: None)
        self._runner = EpisodeRunner(
            sampler, workflow, run_seed, episode_timeout_s, max_retries, self._on_retry
        )
        self._changed = threading.Condition()
        self._ready: dict[int, TrajectoryGroup] = {}
        self._counts = Counts()
        self._failure: BaseException | None = None
        self._exhausted: IndexError | None = None
        self._paused = self._closing = False
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._groups: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, name="jaxrl-collector", daemon=True)

    # Called from the trainer's thread.

    def start(self) -> Collector:
        """Begin to dispatch; returns at once."""
        self._thread.start()
        return self

    def __enter__(self) -> Collector:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def next_batch(self, version: int, n_groups: int, timeout_s: float) -> list[TrajectoryGroup]:
        """Wait for the groups that train `version` (the one last given to `set_version`).

        Returns `n_groups` groups in the order of their prompt index; of the groups that are ready,
        those with the oldest tokens. Groups with a token older than `max_staleness` allows are
        dropped and their prompts sampled anew. Raises `DeadlineError` naming what is outstanding,
        `StaleDataError` for a token from the future, and whatever made an episode fail.
        """
        self._check_request(version, n_groups)
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                self._raise_failure()
                dropped = self._drop_stale(version)
                if len(self._ready) >= n_groups:
                    batch = self._consume(version, n_groups)
                    break
                if not dropped:
                    self._raise_exhausted(n_groups)
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise DeadlineError(self._waiting_for(version, n_groups, timeout_s))
                    self._changed.wait(remaining)
            self._report_dropped(dropped, version)
        self._report_dropped(dropped, version)
        return batch

    def set_version(self, version: int) -> None:
        """The trainer holds `version`, and the sampler already samples from it."""
        with self._changed:
            self._controller.on_version(version)
        self._notify_loop()

    def frontier(self) -> dict[str, Any]:
        """JSON state of the prompts done with, for a checkpoint."""
        with self._changed:
            return self._frontier.state()

    def metrics(self) -> dict[str, float]:
        """Totals since the start (groups), and what is queued (groups) and running (episodes)."""
        with self._changed:
            return self._counts.metrics() | {
                "rollout/queue": float(len(self._ready)),
                "rollout/running": float(len(self._runner.outstanding())),
            }

    def pause(self) -> None:
        """Dispatch no more groups; those running go on."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Dispatch again."""
        with self._changed:
            self._paused = False
        self._notify_loop()

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel what is running and end the thread; takes at most `timeout_s`. May be repeated."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._notify_loop()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            _LOGGER.warning(
                "the collector's thread did not end within %g s: an episode blocks its event loop "
                "(outstanding: %s)",
                timeout_s,
                self._runner.describe(),
            )
        elif not self._loop.is_closed():
            self._loop.close()

    # Helpers of next_batch; all of them run under the condition unless they say otherwise.

    def _check_request(self, version: int, n_groups: int) -> None:
        if n_groups * self._group_size != self._controller.batch_size:
            raise ValueError(
                f"{n_groups} groups of {self._group_size} are not a batch of "
                f"{self._controller.batch_size} trajectories, which admission counts with"
            )
        if version != self._controller.version:
            raise ValueError(
                f"next_batch for version {version}, but set_version was last called with "
                f"{self._controller.version}"
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing or not self._thread.is_alive():
            raise RolloutError("the collector is not running: it was closed or never started")

    def _raise_exhausted(self, n_groups: int) -> None:
        if self._exhausted is not None and not self._controller.running:
            raise DataError(
                f"the prompts ended with {len(self._ready)} groups ready of the {n_groups} that a "
                f"batch needs (frontier {self._frontier.state()})"
            ) from self._exhausted

    def _drop_stale(self, version: int) -> list[TrajectoryGroup]:
        stale = [
            group
            for group in self._ready.values()
            if not self._controller.check_consumption(group, version)
        ]
        for group in stale:
            del self._ready[group.prompt_index]
            self._controller.drop(self._group_size)
            self._frontier.give_back(group.prompt_index)
        self._counts.dropped_stale += len(stale)
        return stale

    def _consume(self, version: int, n_groups: int) -> list[TrajectoryGroup]:
        # Oldest tokens first: they are the ones that the next version would find too old.
        by_age = sorted(self._ready.values(), key=lambda g: (oldest_version(g), g.prompt_index))
        batch = sorted(by_age[:n_groups], key=lambda g: g.prompt_index)
        for group in batch:
            del self._ready[group.prompt_index]
            self._frontier.settle(group.prompt_index)
        self._counts.measure(batch, version)
        return batch

    def _report_dropped(self, groups: list[TrajectoryGroup], version: int) -> None:
        """Without the condition: tell the ledger, and the loop that there is room."""
        for group in groups:
            self._record(
                "dropped",
                **group_fields(group.group_id, group.prompt_index, self._group_size),
                version=version,
                oldest_version=oldest_version(group),
            )
        if groups:
            self._notify_loop()

    def _waiting_for(self, version: int, n_groups: int, timeout_s: float) -> str:
        rejected = dict(self._counts.rejected)
        return (
            f"waited {timeout_s:g} s for {n_groups} groups to train version {version}: "
            f"{len(self._ready)} ready; outstanding: {self._runner.describe()}"
            + (f"; rejected so far: {rejected}" if rejected else "")
            + ("; the collector is paused" if self._paused else "")
        )

    def _notify_loop(self) -> None:
        """From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            # The loop is closed already; whoever waits learns that from the state.
            return

    # On the collector's thread.

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
            self._loop.run_until_complete(self._cancel_rest())
        except BaseException as error:
            self._fail(error)
            raise

    async def _main(self) -> None:
        while not self._closing:
            while (index := self._admit()) is not None:
                self._dispatch(index)
            await self._wake.wait()
            self._wake.clear()

    async def _cancel_rest(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            # Bounded: an episode that swallows its cancellation must not keep the process.
            await asyncio.wait(rest, timeout=_CANCEL_GRACE_S)

    def _admit(self) -> int | None:
        """The index of the next prompt if a whole group may start now."""
        with self._changed:
            stopped = self._paused or self._closing or self._failure or self._exhausted
            if stopped or not self._controller.admit(self._group_size):
                return None
            return self._frontier.take()

    def _dispatch(self, index: int) -> None:
        try:
            prompt = dataclasses.replace(self._prompts[index], index=index)
            version = self._controller.version
            self._record(
                "dispatched", **group_fields(prompt.id, index, self._group_size), version=version
            )
        except IndexError as error:
            self._end_of_prompts(index, error)
            return
        except Exception as error:
            self._fail(error)
            return
        with self._changed:
            self._counts.dispatched += 1
        task = self._loop.create_task(self._run_group(prompt))
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)

    def _end_of_prompts(self, index: int, error: IndexError) -> None:
        with self._changed:
            self._exhausted = error
            self._controller.reject(self._group_size)
            self._frontier.give_back(index)
            self._changed.notify_all()

    async def _run_group(self, prompt: Prompt) -> None:
        """All samples of one prompt; one rejected sample rejects the group."""
        episodes = [
            self._loop.create_task(self._runner.run(prompt, i)) for i in range(self._group_size)
        ]
        try:
            for finished in asyncio.as_completed(episodes):
                outcome = await finished
                if isinstance(outcome, Rejected):
                    self._reject(prompt, outcome)
                    return
            trajectories = tuple(task.result() for task in episodes)
            self._accept(TrajectoryGroup(prompt.id, prompt.index, trajectories))
        except Exception as error:
            self._fail(error)
        finally:
            for task in episodes:
                task.add_done_callback(retrieve)
                task.cancel()
            self._wake.set()

    def _accept(self, group: TrajectoryGroup) -> None:
        self._record(
            "accepted", **group_fields(group.group_id, group.prompt_index, self._group_size)
        )
        with self._changed:
            self._controller.accept(self._group_size)
            self._ready[group.prompt_index] = group
            self._counts.accepted += 1
            self._changed.notify_all()

    def _reject(self, prompt: Prompt, outcome: Rejected) -> None:
        self._record(
            "rejected",
            **group_fields(prompt.id, prompt.index, self._group_size),
            sample_id=outcome.sample_id,
            reason=outcome.reason,
            detail=outcome.detail,
        )
        _LOGGER.debug("rejected %s: %s %s", outcome.sample_id, outcome.reason, outcome.detail)
        with self._changed:
            self._controller.reject(self._group_size)
            self._frontier.settle(prompt.index)
            self._counts.rejected[outcome.reason] += 1

    def _on_retry(self, prompt: Prompt, sample_id: str, attempt: int, how: str) -> None:
        _LOGGER.warning("episode %s is dispatched again: %s", sample_id, how)
        self._record(
            "dispatched",
            group_id=prompt.id,
            prompt_index=prompt.index,
            sample_ids=[sample_id],
            version=self._controller.version,
            attempt=attempt,
            after=how,
        )
        with self._changed:
            self._counts.retried += 1

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            # The first error is the cause; what follows is its wake.
            self._failure = self._failure or error
            self._changed.notify_all()

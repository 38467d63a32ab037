"""Runs single episodes with a time limit and a bounded number of repetitions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.errors import ConfigError, DeadlineError, JaxrlError, RolloutError
from jaxrl.rollout.workflow import (
    EpisodeSampler,
    LostRequestError,
    Workflow,
    check_trajectory,
    sample_id_of,
)
from jaxrl.types import Prompt, Rejected, Sampler, Trajectory


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """One attempt that ended without an outcome, and how."""

    how: str


class EpisodeRunner:
    """Plays episodes of one workflow; lives on the collector's event loop.

    An attempt is lost when it exceeds `timeout_s` (waiting for a free slot of the driver included)
    or when its request was cancelled. It is then cancelled and played again with the same sample id
    and the same seeds, at most `max_retries` times.
    """

    def __init__(
        self,
        sampler: Sampler,
        workflow: Workflow,
        run_seed: int,
        timeout_s: float,
        max_retries: int,
        on_retry: Callable[[Prompt, str, int, str], None],
    ):
        """`on_retry(prompt, sample_id, attempt, how)` is called before each repetition."""
        if timeout_s <= 0:
            raise ConfigError(f"episode_timeout_s={timeout_s} must be positive")
        if max_retries < 0:
            raise ConfigError(f"max_retries={max_retries} must be at least 0")
        self._sampler = sampler
        self._workflow = workflow
        self._run_seed = run_seed
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._on_retry = on_retry
        self._outstanding: dict[str, tuple[float, int]] = {}

    def outstanding(self) -> dict[str, tuple[float, int]]:
        """Sample id -> (seconds since its dispatch, attempt), longest first. From any thread."""
        # dict.copy is one step for the interpreter: the loop may go on adding and removing.
        now, entries = time.monotonic(), self._outstanding.copy()
        oldest_first = sorted(entries.items(), key=lambda item: item[1][0])
        return {name: (now - began, attempt) for name, (began, attempt) in oldest_first}

    def describe(self, most: int = 8) -> str:
        """The episodes outstanding for longest, in words."""
        entries = self.outstanding()
        named = [
            f"{name} for {age:.1f} s" + (f" (attempt {attempt + 1})" if attempt else "")
            for name, (age, attempt) in list(entries.items())[:most]
        ]
        more = [f"and {len(entries) - most} more"] if len(entries) > most else []
        return ", ".join(named + more) or "no episodes"

    async def run(self, prompt: Prompt, sample_index: int) -> Trajectory | Rejected:
        """One sample of a prompt. Every error it raises names the sample id."""
        sample_id = sample_id_of(prompt.id, sample_index)
        began, how = time.monotonic(), ""
        try:
            for attempt in range(self._max_retries + 1):
                if attempt:
                    self._on_retry(prompt, sample_id, attempt, how)
                self._outstanding[sample_id] = (began, attempt)
                outcome = await self._attempt(prompt, sample_id)
                if not isinstance(outcome, Lost):
                    return outcome
                how = outcome.how
        finally:
            self._outstanding.pop(sample_id, None)
        raise DeadlineError(
            f"episode {sample_id} was lost {self._max_retries + 1} times in "
            f"{time.monotonic() - began:.1f} s (max_retries={self._max_retries}); last: {how}"
        )

    async def _attempt(self, prompt: Prompt, sample_id: str) -> Trajectory | Rejected | Lost:
        sampler = EpisodeSampler(self._sampler, run_seed=self._run_seed, sample_id=sample_id)
        task = asyncio.create_task(_play(self._workflow, sampler, prompt))
        try:
            # Not wait_for: it waits for the cancelled episode too, which may refuse to end.
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            finished = task.done()
            if not finished:
                task.add_done_callback(retrieve)
                task.cancel()
        if not finished:
            return Lost(f"no outcome within {self._timeout_s:g} s")
        if task.cancelled():
            return Lost("its request was cancelled")
        error = task.exception()
        if isinstance(error, LostRequestError):
            return Lost(str(error))
        if error is not None:
            raise _named(error, sample_id) from error
        return _identified(task.result(), prompt, sample_id)


async def _play(workflow: Workflow, sampler: Sampler, prompt: Prompt) -> Any:
    try:
        return await workflow.run(sampler, prompt)
    except (SystemExit, KeyboardInterrupt) as error:
        # asyncio lets these two through to the loop, which would end it under everyone's feet.
        raise RolloutError(f"the workflow raised {error!r}") from error


def group_fields(group_id: str, prompt_index: int, group_size: int) -> dict[str, Any]:
    """The ledger fields that every event of a group has."""
    return {
        "group_id": group_id,
        "prompt_index": prompt_index,
        "sample_ids": [sample_id_of(group_id, i) for i in range(group_size)],
    }


def retrieve(task: asyncio.Future[Any]) -> None:
    """Take note of a task that nobody waits for, so that asyncio does not warn about its error."""
    if not task.cancelled():
        task.exception()


def _named(error: BaseException, sample_id: str) -> JaxrlError:
    """The same kind of error with the sample id in front, where its constructor allows that."""
    if isinstance(error, JaxrlError):
        with contextlib.suppress(TypeError):
            return type(error)(f"episode {sample_id}: {error}")
    return RolloutError(f"episode {sample_id}: the workflow raised {type(error).__name__}: {error}")


def _identified(outcome: Any, prompt: Prompt, sample_id: str) -> Trajectory | Rejected:
    """The outcome with the identity that the collector knows, checked."""
    names: Mapping[str, Any] = {"sample_id": sample_id, "group_id": prompt.id}
    if isinstance(outcome, Rejected):
        return dataclasses.replace(outcome, **names)
    if isinstance(outcome, Trajectory):
        return check_trajectory(dataclasses.replace(outcome, **names, prompt_index=prompt.index))
    raise RolloutError(
        f"episode {sample_id}: the workflow returned {type(outcome).__name__}; "
        "it must return a Trajectory or Rejected"
    )

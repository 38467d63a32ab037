"""Scripted stand-ins for the inference side, and small records to feed the rollout room with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from jaxrl.rollout.collector import Collector
from jaxrl.rollout.single_turn import SingleTurn
from jaxrl.rollout.staleness import StalenessController
from jaxrl.types import (
    NO_VERSION,
    Completion,
    Prompt,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
)


def make_prompt(index: int) -> Prompt:
    tokens = np.array([7, 8, index % 100], np.int32)
    return Prompt(f"train/e0/{index:05d}", index, f"q{index}", tokens, {"answer": str(index)})


class EndlessPrompts:
    """Prompt i for every i >= 0."""

    def __getitem__(self, index: int) -> Prompt:
        return make_prompt(index)


class ScriptedSampler:
    """Answers at once with tokens drawn from the seed, stamped with `version`.

    `before(tokens, params)` may be a coroutine function that delays or fails a request.
    """

    def __init__(self, *, length: int = 3):
        self.version = 0
        self.length = length
        self.requests: list[tuple[int, int]] = []
        self.before: Callable[[np.ndarray, SamplingParams], Any] | None = None
        self.cancelled = 0

    async def sample(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        self.requests.append((int(tokens[2]), params.seed))
        version = self.version
        try:
            if self.before is not None:
                await self.before(tokens, params)
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        drawn = np.random.default_rng(params.seed).integers(0, 50, self.length)
        return Completion(
            tokens=drawn.astype(np.int32),
            logprobs=np.full(self.length, -0.5, np.float32),
            versions=np.full(self.length, version, np.int32),
            finish_reason="stop",
            text="t",
        )


@dataclasses.dataclass
class Score:
    value: float | None
    outcome: str = "ok"
    detail: str = ""


class ScriptedPool:
    """Scores by `rule(completion, reference)`; without a rule by the parity of the tokens."""

    def __init__(self, rule: Callable[[Completion, Mapping[str, Any]], Score] | None = None):
        self.rule = rule or (lambda completion, _: Score(float(completion.tokens.sum() % 2)))

    async def score(self, completion: Completion, reference: Mapping[str, Any]) -> Score:
        await asyncio.sleep(0)
        return self.rule(completion, reference)


class Journal:
    """A ledger callback that keeps what it is told, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entries: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        with self._lock:
            self.entries.append((event, fields))

    def of(self, event: str) -> list[dict[str, Any]]:
        with self._lock:
            return [fields for name, fields in self.entries if name == event]


def make_trajectory(
    sample_id: str = "p/0",
    *,
    sampled: int = 3,
    version: int = 0,
    reward: float = 0.0,
    index: int = 0,
) -> Trajectory:
    mask = np.array([False, False] + [True] * sampled)
    return Trajectory(
        sample_id=sample_id,
        group_id=sample_id.rpartition("/")[0],
        prompt_index=index,
        tokens=np.arange(len(mask), dtype=np.int32) + 1,
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-0.25), np.float32(0)),
        versions=np.where(mask, version, NO_VERSION).astype(np.int32),
        reward=reward,
        finish_reason="stop",
        text="t",
    )


def make_group(
    index: int = 0, *, rewards: tuple[float, ...] = (0.0, 1.0), version: int = 0, sampled: int = 3
) -> TrajectoryGroup:
    name = f"p{index}"
    members = tuple(
        make_trajectory(f"{name}/{i}", sampled=sampled, version=version, reward=r, index=index)
        for i, r in enumerate(rewards)
    )
    return TrajectoryGroup(name, index, members)


@pytest.fixture
def fakes():
    """The names of this file, for tests that import it under `--import-mode=importlib`."""

    names = (
        make_prompt,
        make_trajectory,
        make_group,
        EndlessPrompts,
        ScriptedSampler,
        ScriptedPool,
        Score,
        Journal,
    )
    return types.SimpleNamespace(**{value.__name__: value for value in names})


@pytest.fixture
def single_turn():
    """The workflow of one completion, with a scripted pool."""
    return SingleTurn(ScriptedPool(), max_new_tokens=8)


@pytest.fixture
def collecting():
    """Factory of started collectors, all closed after the test."""
    with contextlib.ExitStack() as stack:

        def start(
            sampler: Any,
            workflow: Any,
            *,
            max_staleness: int = 0,
            batch_size: int = 4,
            group_size: int = 2,
            start_version: int = 0,
            max_concurrent: int = 0,
            prompts: Any = None,
            **options: Any,
        ) -> Collector:
            controller = StalenessController(
                max_staleness, batch_size, start_version, max_concurrent=max_concurrent
            )
            options = {"run_seed": 0, "episode_timeout_s": 30.0} | options
            return stack.enter_context(
                Collector(
                    sampler,
                    workflow,
                    EndlessPrompts() if prompts is None else prompts,
                    controller=controller,
                    group_size=group_size,
                    **options,
                )
            )

        yield start

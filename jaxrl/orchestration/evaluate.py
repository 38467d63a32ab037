"""Evaluation on held-out prompts, pinned to one version of the weights."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrl.errors import DeadlineError, RewardError, WeightVersionError
from jaxrl.orchestration import hosts
from jaxrl.rollout.single_turn import ScorePool, ScoreResult
from jaxrl.rollout.workflow import derive_seed
from jaxrl.types import Completion, Prompt, Sampler, SamplingParams, WeightVersion


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result. `accuracy` is the fraction of all prompts whose score is 1 or more.

    A prompt whose scorer ran out of time is counted in `timeouts` and not in `reward`; it cannot
    count as correct. `examples` holds a few (prompt, completion, score) for people to look at.
    """

    version: WeightVersion
    prompts: int
    accuracy: float
    reward: float
    timeouts: int
    completion_length: float
    seconds: float
    examples: tuple[tuple[str, str, float], ...] = ()

    def metrics(self) -> dict[str, float]:
        """The numbers, named for the tracker and the summary."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/reward": self.reward,
            "eval/completion_length": self.completion_length,
            "eval/timeouts": float(self.timeouts),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Evaluation:
        """What the ledger's `evaluated` event remembers (no examples)."""
        return cls(
            version=WeightVersion(record["version"], record["digest"]),
            prompts=record["prompts"],
            accuracy=record["eval/accuracy"],
            reward=record["eval/reward"],
            timeouts=int(record["eval/timeouts"]),
            completion_length=record["eval/completion_length"],
            seconds=0.0,
        )


def evaluate(
    sampler: Sampler,
    pool: ScorePool,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    version: WeightVersion,
    seed: int = 0,
    timeout_s: float | None = 600.0,
    watch: Callable[[Prompt, Completion, float | None], None] = lambda *_: None,
) -> Evaluation:
    """Sample each prompt once under `version` and score it. Runs an event loop of its own.

    Several processes share the prompts, and each gets the result of all of them.

    `watch` is called for each prompt that has been scored, as soon as it has (None: the scorer ran
    out of time). Raises `WeightVersionError` if a token of another version appears, `DeadlineError`
    after `timeout_s` (None: never), and `RewardError` as soon as the scorer fails.
    """
    began = time.monotonic()

    async def one(prompt: Prompt) -> tuple[Completion, float | None]:
        own = dataclasses.replace(params, seed=derive_seed(seed, prompt.id, 0))
        completion = await sampler.sample(prompt.tokens, own)
        score = _score(prompt, await pool.score(completion, prompt.reference))
        watch(prompt, completion, score)
        return completion, score

    def own_share() -> list[tuple[int, str, float | None]]:
        mine = hosts.share(prompts)
        outcomes = _run(_all([one(prompt) for prompt in mine], timeout_s))
        completions = [completion for completion, _ in outcomes]
        _require_version(mine, completions, version)
        return [(len(c.tokens), c.text, score) for c, score in outcomes]

    outcomes = hosts.interleave(hosts.exchange("the evaluation", own_share))
    scores = [score for _, _, score in outcomes]
    known = [score for score in scores if score is not None]
    return Evaluation(
        version=version,
        prompts=len(prompts),
        accuracy=float(np.mean([score is not None and score >= 1.0 for score in scores])),
        reward=float(np.mean(known)) if known else 0.0,
        timeouts=len(scores) - len(known),
        completion_length=float(np.mean([length for length, _, _ in outcomes])),
        seconds=time.monotonic() - began,
        examples=tuple(
            (p.text, text, float("nan") if s is None else s)
            for p, (_, text, s) in zip(prompts[:5], outcomes, strict=False)
        ),
    )


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, also for callers whose thread runs an event loop (notebooks)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _all(work: Sequence[Coroutine[Any, Any, Any]], timeout_s: float | None) -> list[Any]:
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return list(await asyncio.gather(*tasks))
    except TimeoutError:
        if not limit.expired():
            raise
        done = sum(task.done() and not task.cancelled() for task in tasks)
        raise DeadlineError(
            f"waited {timeout_s:g} s for the evaluation: {done} of {len(tasks)} prompts finished"
        ) from None
    finally:
        for task in tasks:
            task.cancel()


def _require_version(
    prompts: Sequence[Prompt], completions: Sequence[Completion], version: WeightVersion
) -> None:
    for prompt, completion in zip(prompts, completions, strict=True):
        other = completion.versions[completion.versions != version.number]
        if other.size:
            raise WeightVersionError(
                f"evaluation of {version}: prompt {prompt.id} got a token of version {other[0]}"
            )


def _score(prompt: Prompt, result: ScoreResult) -> float | None:
    if result.outcome == "error":
        raise RewardError(f"scoring prompt {prompt.id} failed: {result.detail}")
    return None if result.outcome == "timeout" else float(result.value)

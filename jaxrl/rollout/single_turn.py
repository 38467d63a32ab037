"""The simplest workflow: one completion, one score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from jaxrl.errors import ConfigError, RewardError
from jaxrl.rollout.workflow import TrajectoryBuilder
from jaxrl.types import Completion, Prompt, Rejected, Sampler, SamplingParams, Trajectory


class ScoreResult(Protocol):
    """What a pool answers: `value` is a finite number exactly when `outcome` is "ok"."""

    value: float | None
    outcome: Literal["ok", "timeout", "error"]
    detail: str


class ScorePool(Protocol):
    """Scores one completion without blocking the event loop (`jaxrl.rewards.pool.RewardPool`)."""

    async def score(self, completion: Completion, reference: Mapping[str, Any]) -> ScoreResult:
        """The reward, or how scoring failed."""


class SingleTurn:
    """Samples one completion of the prompt and scores it against the prompt's reference.

    A reward that timed out rejects the episode as "reward_timeout": it is not a wrong answer. A
    reward function that failed raises `RewardError`, or rejects as "reward_error" when `on_error`
    is "reject". `stop_tokens` are ids that end the completion (usually the tokenizer's EOS).
    """

    def __init__(
        self,
        pool: ScorePool,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        stop_tokens: tuple[int, ...] = (),
        on_error: Literal["raise", "reject"] = "raise",
    ):
        if on_error not in ("raise", "reject"):
            raise ConfigError(f"on_error={on_error!r} must be 'raise' or 'reject'")
        self._pool = pool
        self._on_error = on_error
        self._params = SamplingParams(
            max_tokens=max_new_tokens, temperature=temperature, stop_tokens=tuple(stop_tokens)
        )

    async def run(self, sampler: Sampler, prompt: Prompt) -> Trajectory | Rejected:
        """One episode. Raises `RewardError` if the scorer failed and `on_error` is "raise"."""
        completion = await sampler.sample(prompt.tokens, self._params)
        result = await self._pool.score(completion, prompt.reference)
        if result.outcome == "timeout":
            return Rejected("", prompt.id, "reward_timeout", result.detail)
        if result.outcome == "error":
            if self._on_error == "raise":
                raise RewardError(f"the reward function failed: {result.detail}")
            return Rejected("", prompt.id, "reward_error", result.detail)
        builder = TrajectoryBuilder(prompt)
        builder.add_completion(completion)
        return builder.build(float(result.value))

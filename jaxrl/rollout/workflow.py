"""What an episode is: the workflow protocol, the sampler it gets, the trajectory it builds.

A workflow is one object for all episodes of a run; `run` is called once per sample, concurrently,
on one event loop. It must not block: await the sampler, the reward pool, or
`asyncio.to_thread(...)` for anything slow.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Protocol

import numpy as np

from jaxrl.errors import DriverError, RolloutError
from jaxrl.types import (
    NO_VERSION,
    Completion,
    FinishReason,
    Prompt,
    Rejected,
    Sampler,
    SamplingParams,
    Trajectory,
)


class Workflow(Protocol):
    """One way of turning a prompt into a trajectory: any number of turns and tool calls."""

    async def run(self, sampler: Sampler, prompt: Prompt) -> Trajectory | Rejected:
        """Play one episode. The collector fills in sample id, group id and prompt index."""


class LostRequestError(DriverError):
    """The driver gave up a request before it was finished; the episode is dispatched again."""


def sample_id_of(prompt_id: str, sample_index: int) -> str:
    """The identity of one sample: stable over retries and restarts."""
    return f"{prompt_id}/{sample_index}"


def derive_seed(run_seed: int, sample_id: str, call: int) -> int:
    """Seed in [0, 2**63) of the `call`-th request of an episode.

    A stable hash (BLAKE2b), so that processes and restarts agree and samples do not collide.
    """
    text = f"{run_seed}\x00{sample_id}\x00{call}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class EpisodeSampler:
    """The sampler of one episode: passes requests on with the seed that belongs to this sample.

    Whatever seed the workflow sets is replaced: constant seeds fill a group with clones.
    """

    def __init__(self, sampler: Sampler, *, run_seed: int, sample_id: str):
        self._sampler = sampler
        self._run_seed = run_seed
        self._sample_id = sample_id
        self._calls = 0

    @property
    def sample_id(self) -> str:
        """The id of the sample that this episode produces."""
        return self._sample_id

    async def sample(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        """tokens int32 [P] -> the completion. Raises `LostRequestError` if it was cancelled."""
        seed = derive_seed(self._run_seed, self._sample_id, self._calls)
        self._calls += 1
        completion = await self._sampler.sample(tokens, dataclasses.replace(params, seed=seed))
        if completion.finish_reason == "cancelled":
            raise LostRequestError(f"request {self._calls - 1} was cancelled by the driver")
        return completion


class TrajectoryBuilder:
    """Joins prompt, completions and tool output into one sequence, by token ids only.

    Nothing is decoded and encoded again between turns, so the trainer sees exactly the tokens that
    the sampler produced. `tokens` is what the next request of the episode has to send.
    """

    def __init__(self, prompt: Prompt):
        self._prompt = prompt
        self._tokens: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._texts: list[str] = []
        self._finish_reason: FinishReason = "stop"
        self.add_tokens(prompt.tokens)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]: everything so far."""
        return np.concatenate(self._tokens)

    def add_completion(self, completion: Completion) -> None:
        """Append sampled tokens (mask True) with their log-probabilities and versions."""
        sizes = {len(completion.tokens), len(completion.logprobs), len(completion.versions)}
        if len(sizes) != 1:
            raise RolloutError(
                f"completion of {len(completion.tokens)} tokens has {len(completion.logprobs)} "
                f"logprobs and {len(completion.versions)} versions; the lengths must be equal"
            )
        self._tokens.append(np.asarray(completion.tokens, np.int32))
        self._mask.append(np.ones(len(completion.tokens), bool))
        self._logprobs.append(np.asarray(completion.logprobs, np.float32))
        self._versions.append(np.asarray(completion.versions, np.int32))
        self._texts.append(completion.text)
        self._finish_reason = completion.finish_reason

    def add_tokens(self, tokens: np.ndarray) -> None:
        """Append tokens that no weights produced (tool output, a next question): mask False."""
        tokens = np.asarray(tokens, np.int32)
        self._tokens.append(tokens)
        self._mask.append(np.zeros(len(tokens), bool))
        self._logprobs.append(np.zeros(len(tokens), np.float32))
        self._versions.append(np.full(len(tokens), NO_VERSION, np.int32))

    def build(self, reward: float) -> Trajectory:
        """The finished trajectory; its finish reason is that of the last completion."""
        return Trajectory(
            sample_id="",
            group_id=self._prompt.id,
            prompt_index=self._prompt.index,
            tokens=self.tokens,
            loss_mask=np.concatenate(self._mask),
            logprobs=np.concatenate(self._logprobs),
            versions=np.concatenate(self._versions),
            reward=reward,
            finish_reason=self._finish_reason,
            text="".join(self._texts),
        )


def check_trajectory(trajectory: Trajectory) -> Trajectory:
    """Return it unchanged, or raise `RolloutError` naming the sample id and the rule broken."""
    t = trajectory
    size, mask = len(t.tokens), np.asarray(t.loss_mask)
    lengths = {f: len(getattr(t, f)) for f in ("loss_mask", "logprobs", "versions")}
    if wrong := {f: n for f, n in lengths.items() if n != size}:
        raise RolloutError(f"{t.sample_id}: {size} tokens but lengths {wrong}; they must be equal")
    if mask.dtype != bool or not mask.any():
        raise RolloutError(
            f"{t.sample_id}: loss_mask has dtype {mask.dtype} and {int(mask.sum())} tokens set; "
            "it must be bool and mark at least one sampled token"
        )
    if not np.array_equal(mask, np.asarray(t.versions) != NO_VERSION):
        raise RolloutError(
            f"{t.sample_id}: sampled tokens need a version, all others {NO_VERSION}; "
            "loss_mask and versions disagree"
        )
    logprobs = np.asarray(t.logprobs)
    if not np.isfinite(logprobs).all() or logprobs[~mask].any():
        raise RolloutError(
            f"{t.sample_id}: logprobs must be finite, and 0 where loss_mask is False"
        )
    if not np.isfinite(t.reward):
        raise RolloutError(f"{t.sample_id}: reward {t.reward} must be a finite number")
    return trajectory

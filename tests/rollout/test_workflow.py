"""Episodes: seeds, the builder, the checks of what a workflow returns."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from jaxrl.errors import RewardError, RolloutError
from jaxrl.rollout.single_turn import SingleTurn
from jaxrl.rollout.workflow import (
    EpisodeSampler,
    LostRequestError,
    TrajectoryBuilder,
    check_trajectory,
    derive_seed,
)
from jaxrl.types import Completion, Rejected, SamplingParams


def _completion(*tokens: int, version: int = 3, reason: str = "stop") -> Completion:
    n = len(tokens)
    return Completion(
        np.array(tokens, np.int32),
        np.linspace(-1, -0.5, n).astype(np.float32),
        np.full(n, version, np.int32),
        reason,
        "x" * n,
    )


def test_derive_seed_samples_calls_and_runs_never_collide():
    seeds = {
        derive_seed(run, f"train/e0/{prompt:05d}/{sample}", call)
        for run in range(3)
        for prompt in range(500)
        for sample in range(8)
        for call in range(3)
    }

    assert len(seeds) == 3 * 500 * 8 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_derive_seed_other_process_agrees():
    # Python's own hash differs between processes; this one may not.
    code = "from jaxrl.rollout.workflow import derive_seed; print(derive_seed(5, 'p/1', 2))"

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert int(result.stdout) == derive_seed(5, "p/1", 2) == 5963560157120479152


def test_episode_sampler_replaces_constant_seed_for_each_call(fakes):
    sampler = fakes.ScriptedSampler()
    episode = EpisodeSampler(sampler, run_seed=1, sample_id="p/0")

    async def two_calls():
        for _ in range(2):
            await episode.sample(np.array([1, 2, 3], np.int32), SamplingParams(4, seed=99))

    asyncio.run(two_calls())

    assert [seed for _, seed in sampler.requests] == [
        derive_seed(1, "p/0", 0),
        derive_seed(1, "p/0", 1),
    ]


def test_episode_sampler_cancelled_completion_is_a_lost_request():
    class Cancelling:
        async def sample(self, tokens, params):
            return _completion(1, reason="cancelled")

    episode = EpisodeSampler(Cancelling(), run_seed=1, sample_id="p/0")

    with pytest.raises(LostRequestError, match="request 0 was cancelled"):
        asyncio.run(episode.sample(np.array([1], np.int32), SamplingParams(4)))


def test_builder_two_turns_with_tool_output_keeps_ids_masks_and_versions(fakes):
    builder = TrajectoryBuilder(fakes.make_prompt(1))

    builder.add_completion(_completion(20, 21, version=3))
    builder.add_tokens(np.array([90, 91]))
    after_tool = builder.tokens.tolist()
    builder.add_completion(_completion(22, version=4, reason="length"))
    t = builder.build(0.5)

    assert after_tool == [7, 8, 1, 20, 21, 90, 91]
    assert t.tokens.tolist() == [7, 8, 1, 20, 21, 90, 91, 22]
    assert t.loss_mask.tolist() == [False] * 3 + [True, True, False, False, True]
    assert t.versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, 4]
    np.testing.assert_allclose(t.logprobs, [0, 0, 0, -1, -0.5, 0, 0, -1], rtol=0, atol=0)
    assert (t.tokens.dtype, t.logprobs.dtype, t.versions.dtype) == (np.int32, np.float32, np.int32)
    assert (t.reward, t.finish_reason, t.text) == (0.5, "length", "xxx")


def test_builder_completion_of_unequal_lengths_is_refused(fakes):
    broken = dataclasses.replace(_completion(1, 2), logprobs=np.zeros(1, np.float32))

    with pytest.raises(RolloutError, match="2 tokens has 1 logprobs"):
        TrajectoryBuilder(fakes.make_prompt(0)).add_completion(broken)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, "lengths"),
        ({"loss_mask": np.zeros(5, bool)}, "at least one sampled"),
        ({"loss_mask": np.ones(5, np.int32)}, "must be bool"),
        ({"versions": np.zeros(5, np.int32)}, "loss_mask and versions disagree"),
        ({"logprobs": np.full(5, np.nan, np.float32)}, "logprobs must be finite"),
        ({"logprobs": np.full(5, -1, np.float32)}, "0 where loss_mask is False"),
        ({"reward": float("nan")}, "reward nan"),
    ],
)
def test_check_trajectory_broken_record_names_sample_and_rule(fakes, change, message):
    broken = dataclasses.replace(fakes.make_trajectory("p/7"), **change)

    with pytest.raises(RolloutError, match=f"p/7.*{message}"):
        check_trajectory(broken)


def _run(workflow, fakes):
    return asyncio.run(workflow.run(fakes.ScriptedSampler(), fakes.make_prompt(4)))


def test_single_turn_scored_completion_becomes_trajectory(fakes):
    pool = fakes.ScriptedPool(lambda completion, reference: fakes.Score(float(reference["answer"])))

    t = _run(SingleTurn(pool, max_new_tokens=8), fakes)

    assert t.reward == 4.0
    assert t.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert t.group_id == "train/e0/00004"


@pytest.mark.parametrize("on_error", ["raise", "reject"])
def test_single_turn_reward_timeout_rejects_and_is_no_wrong_answer(fakes, on_error):
    pool = fakes.ScriptedPool(lambda *_: fakes.Score(None, "timeout", "5 s"))

    outcome = _run(SingleTurn(pool, max_new_tokens=8, on_error=on_error), fakes)

    assert isinstance(outcome, Rejected)
    assert (outcome.reason, outcome.detail) == ("reward_timeout", "5 s")


def test_single_turn_reward_error_raises_or_rejects_as_asked(fakes):
    pool = fakes.ScriptedPool(lambda *_: fakes.Score(None, "error", "ZeroDivisionError"))

    rejected = _run(SingleTurn(pool, max_new_tokens=8, on_error="reject"), fakes)
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        _run(SingleTurn(pool, max_new_tokens=8), fakes)

    assert rejected.reason == "reward_error"


def test_single_turn_unknown_on_error_is_refused(fakes):
    with pytest.raises(ValueError, match="on_error='ignore'"):
        SingleTurn(fakes.ScriptedPool(), max_new_tokens=8, on_error="ignore")

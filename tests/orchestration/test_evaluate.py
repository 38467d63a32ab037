"""Evaluation is pinned to a version and counts what it could not score."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from jaxrl.errors import DeadlineError, RewardError, WeightVersionError
from jaxrl.orchestration.evaluate import evaluate
from jaxrl.rewards.pool import RewardPool
from jaxrl.types import Completion, Prompt, SamplingParams, WeightVersion

VERSION = WeightVersion(3, "d" * 64)
PROMPTS = [
    Prompt(f"eval/{i}", i, f"q{i}", np.array([i + 1], np.int32), {"answer": "1"}) for i in range(4)
]


class ScriptedSampler:
    """Answers with the prompt's first token as text; prompt `odd_one` gets another version."""

    def __init__(self, odd_one: int = -1, hang: bool = False):
        self.odd_one, self.hang = odd_one, hang

    async def sample(self, tokens, params):
        if self.hang:
            await asyncio.Event().wait()
        number = 2 if tokens[0] == self.odd_one else 3
        one = np.array([5], np.int32)
        versions = np.array([number], np.int32)
        return Completion(one, np.zeros(1, np.float32), versions, "stop", str(tokens[0]))


@dataclasses.dataclass
class Result:
    value: float | None
    outcome: str
    detail: str = ""


class ScriptedPool:
    """Score 1 for "1", time-out for "2", 0 otherwise; `fail` makes everything an error."""

    def __init__(self, fail: bool = False):
        self.fail = fail

    async def score(self, completion, reference):
        if self.fail:
            return Result(None, "error", "broken")
        if completion.text == "2":
            return Result(None, "timeout")
        return Result(float(completion.text == reference["answer"]), "ok")


def run(sampler, pool, **options):
    return evaluate(sampler, pool, PROMPTS, SamplingParams(4), version=VERSION, **options)


def test_evaluate_timeouts_are_counted_apart_from_wrong_answers():
    result = run(ScriptedSampler(), ScriptedPool())

    assert result.prompts == 4
    assert result.accuracy == 0.25
    assert result.timeouts == 1
    np.testing.assert_allclose(result.reward, 1 / 3, rtol=0, atol=1e-12)


def test_evaluate_tells_the_watcher_of_each_prompt_once_it_is_scored():
    seen = []

    run(ScriptedSampler(), ScriptedPool(), watch=lambda p, c, s: seen.append((p.id, c.text, s)))

    assert sorted(seen) == [
        ("eval/0", "1", 1.0),
        ("eval/1", "2", None),
        ("eval/2", "3", 0.0),
        ("eval/3", "4", 0.0),
    ]


def test_evaluate_failing_scorer_ends_it_while_others_still_sample():
    class FirstOnly(ScriptedSampler):
        async def sample(self, tokens, params):
            self.hang = tokens[0] != 1
            return await super().sample(tokens, params)

    with pytest.raises(RewardError, match="eval/0.*broken"):
        run(FirstOnly(), ScriptedPool(fail=True), timeout_s=None)


def test_evaluate_token_of_another_version_is_an_error():
    with pytest.raises(WeightVersionError, match="version 2"):
        run(ScriptedSampler(odd_one=2), ScriptedPool())


def test_evaluate_failing_scorer_is_an_error_with_the_prompt():
    with pytest.raises(RewardError, match="eval/0.*broken"):
        run(ScriptedSampler(), ScriptedPool(fail=True))


def test_evaluate_sampler_that_never_answers_meets_the_deadline():
    with pytest.raises(DeadlineError, match="0 of 4"):
        run(ScriptedSampler(hang=True), ScriptedPool(), timeout_s=0.05)


@pytest.mark.asyncio
async def test_evaluate_inside_a_running_event_loop_works_as_in_a_notebook():
    result = run(ScriptedSampler(), ScriptedPool())

    assert result.prompts == 4


def test_evaluate_text_that_keeps_the_scorer_busy_for_ever_costs_one_prompt():
    pytest.importorskip("math_verify", reason="needs the extra `math`")
    texts = {1: r"\boxed{9^{9^{9^{9}}}}", 2: r"\boxed{2/2}", 3: "9**9**9**9", 4: "1"}

    class Hostile(ScriptedSampler):
        async def sample(self, tokens, params):
            completion = await super().sample(tokens, params)
            return dataclasses.replace(completion, text=texts[int(tokens[0])])

    with RewardPool("symbolic", workers=2, timeout_s=2.0) as pool:
        result = run(Hostile(), pool, timeout_s=None)

    assert (result.timeouts, result.accuracy) == (2, 0.5)

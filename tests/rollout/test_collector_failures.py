"""What the collector does about rejections, failing workflows, lost requests and deadlines."""

from __future__ import annotations

import asyncio
import collections
import threading

import pytest
from rollout.collector_helpers import LONG, indices, wait_until

from jaxrl.errors import (
    DeadlineError,
    RewardError,
    RolloutError,
)
from jaxrl.rollout.single_turn import SingleTurn
from jaxrl.rollout.workflow import TrajectoryBuilder, derive_seed
from jaxrl.types import Rejected, SamplingParams


def test_rejected_member_rejects_its_group_and_another_prompt_is_drawn(fakes, collecting):
    journal = fakes.Journal()

    def rule(completion, reference):
        return (
            fakes.Score(None, "timeout", "slow") if reference["answer"] == "1" else fakes.Score(1.0)
        )

    workflow = SingleTurn(fakes.ScriptedPool(rule), max_new_tokens=8)
    collector = collecting(fakes.ScriptedSampler(), workflow, ledger=journal)

    groups = collector.next_batch(0, 2, LONG)

    assert indices(groups) == [0, 2]
    (event,) = journal.of("rejected")
    assert (event["prompt_index"], event["reason"], event["detail"]) == (
        1,
        "reward_timeout",
        "slow",
    )
    metrics = collector.metrics()
    assert metrics["rollout/rejected"] == metrics["rollout/rejected/reward_timeout"] == 1
    assert collector.frontier() == {"next": 3, "beyond": []}


def test_rejection_cancels_the_rest_of_the_group(fakes, collecting):
    sampler = fakes.ScriptedSampler()

    class RejectFirst:
        async def run(self, sampler, prompt):
            if prompt.index == 0 and sampler.sample_id.endswith("/0"):
                return Rejected("", "", "unwanted")
            if prompt.index == 0:
                await sampler.sample(prompt.tokens, SamplingParams(4))
            builder = TrajectoryBuilder(prompt)
            builder.add_completion(await sampler.sample(prompt.tokens, SamplingParams(4)))
            return builder.build(1.0)

    async def before(tokens, params):
        if tokens[2] == 0:
            await asyncio.sleep(60)

    sampler.before = before
    collector = collecting(sampler, RejectFirst())

    assert indices(collector.next_batch(0, 2, LONG)) == [1, 2]
    wait_until(lambda: sampler.cancelled == 1, "the cancellation of the second sample")


def test_reward_error_fails_next_batch_with_sample_id_and_cause(fakes, collecting):
    pool = fakes.ScriptedPool(lambda *_: fakes.Score(None, "error", "KeyError: 'answer'"))
    collector = collecting(fakes.ScriptedSampler(), SingleTurn(pool, max_new_tokens=8))

    for _ in range(2):
        with pytest.raises(RewardError, match=r"episode train/e0/0000\d/\d: .*KeyError: 'answer'"):
            collector.next_batch(0, 2, LONG)


def test_workflow_exception_fails_next_batch_with_sample_id_and_cause(fakes, collecting):
    class Broken:
        async def run(self, sampler, prompt):
            raise ZeroDivisionError("one over nothing")

    collector = collecting(fakes.ScriptedSampler(), Broken())

    with pytest.raises(
        RolloutError, match=r"episode train/e0/0000\d/\d: .*ZeroDivisionError: one over nothing"
    ) as raised:
        collector.next_batch(0, 2, LONG)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("result", [None, 3.0])
def test_workflow_returning_something_else_is_named(fakes, collecting, result):
    class Wrong:
        async def run(self, sampler, prompt):
            return result

    collector = collecting(fakes.ScriptedSampler(), Wrong())

    with pytest.raises(RolloutError, match=rf"returned {type(result).__name__}"):
        collector.next_batch(0, 2, LONG)


def test_workflow_that_calls_exit_fails_next_batch(fakes, collecting):
    class Exiting:
        async def run(self, sampler, prompt):
            raise SystemExit(3)

    collector = collecting(fakes.ScriptedSampler(), Exiting())

    with pytest.raises(RolloutError, match=r"SystemExit\(3\)"):
        collector.next_batch(0, 2, LONG)


def test_lost_request_is_dispatched_again_with_the_same_seed(fakes, collecting, single_turn):
    # Report 8: one lost request blocks the whole loop.
    sampler, journal = fakes.ScriptedSampler(), fakes.Journal()
    lost = derive_seed(0, "train/e0/00001/0", 0)
    calls = collections.Counter()

    async def before(tokens, params):
        calls[params.seed] += 1
        if params.seed == lost and calls[lost] <= 2:
            await asyncio.sleep(60)

    sampler.before = before
    collector = collecting(sampler, single_turn, episode_timeout_s=0.05, ledger=journal)

    groups = collector.next_batch(0, 2, LONG)

    assert indices(groups) == [0, 1]
    assert calls[lost] == 3
    assert sampler.cancelled >= 2
    again = [e for e in journal.of("dispatched") if e.get("sample_ids") == ["train/e0/00001/0"]]
    assert [(e["attempt"], e["after"]) for e in again] == [
        (1, "no outcome within 0.05 s"),
        (2, "no outcome within 0.05 s"),
    ]


def test_lost_request_retries_are_bounded_and_the_error_names_the_episode(
    fakes, collecting, single_turn
):
    sampler = fakes.ScriptedSampler()

    async def before(tokens, params):
        if tokens[2] == 1:
            raise asyncio.CancelledError

    sampler.before = before
    collector = collecting(sampler, single_turn, max_retries=1)

    with pytest.raises(DeadlineError, match=r"train/e0/00001/\d was lost 2 times.*was cancelled"):
        collector.next_batch(0, 2, LONG)


def test_episode_that_refuses_cancellation_does_not_hang_retry_or_close(fakes, collecting):
    class Stubborn:
        def __init__(self):
            self.attempts = collections.Counter()
            self.give_up = asyncio.Event()

        async def run(self, sampler, prompt):
            self.attempts[sampler.sample_id] += 1
            while self.attempts[sampler.sample_id] == 1 and not self.give_up.is_set():
                try:
                    await self.give_up.wait()
                except asyncio.CancelledError:
                    continue
            builder = TrajectoryBuilder(prompt)
            builder.add_completion(await sampler.sample(prompt.tokens, SamplingParams(4)))
            return builder.build(1.0)

    workflow = Stubborn()
    collector = collecting(fakes.ScriptedSampler(), workflow, episode_timeout_s=0.05)

    assert indices(collector.next_batch(0, 2, LONG)) == [0, 1]
    collector._loop.call_soon_threadsafe(workflow.give_up.set)


def test_next_batch_deadline_names_outstanding_samples_and_their_age(
    fakes, collecting, single_turn
):
    sampler = fakes.ScriptedSampler()

    async def before(tokens, params):
        if tokens[2] == 1:
            await asyncio.sleep(60)

    sampler.before = before
    collector = collecting(sampler, single_turn)

    with pytest.raises(
        DeadlineError,
        match=r"waited 0.2 s for 2 groups to train version 0: 1 ready; outstanding: "
        r"train/e0/00001/\d for 0\.\d s, train/e0/00001/\d for",
    ):
        collector.next_batch(0, 2, 0.2)


def test_next_batch_deadline_holds_while_a_workflow_blocks_the_loop(fakes, collecting):
    release = threading.Event()

    class Blocking:
        async def run(self, sampler, prompt):
            release.wait(LONG)  # what a workflow must not do
            return Rejected("", "", "late")

    collector = collecting(fakes.ScriptedSampler(), Blocking())
    try:
        with pytest.raises(DeadlineError, match="outstanding: train/e0/00000/0"):
            collector.next_batch(0, 2, 0.1)
    finally:
        release.set()


def test_endless_rejection_ends_at_the_deadline_with_the_reasons(fakes, collecting):
    class Refusing:
        async def run(self, sampler, prompt):
            await asyncio.sleep(0.001)
            return Rejected("", "", "too_easy")

    collector = collecting(fakes.ScriptedSampler(), Refusing())

    with pytest.raises(DeadlineError, match=r"rejected so far: \{'too_easy': \d+\}"):
        collector.next_batch(0, 2, 0.2)

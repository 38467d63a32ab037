"""The collector with real threads and event loops, over a scripted sampler."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import threading
import time

import numpy as np
import pytest

from jaxrl.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    OutputError,
    RewardError,
    RolloutError,
    StaleDataError,
)
from jaxrl.rollout.single_turn import SingleTurn
from jaxrl.rollout.workflow import TrajectoryBuilder, derive_seed
from jaxrl.types import Rejected, SamplingParams

LONG = 30.0
"""Deadline of waits that end by themselves."""


def _wait_until(condition, what: str) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.002)


def _indices(groups) -> list[int]:
    return [group.prompt_index for group in groups]


@pytest.fixture
def single_turn(fakes):
    return SingleTurn(fakes.ScriptedPool(), max_new_tokens=8)


def test_next_batch_whole_groups_in_prompt_order_with_identities(fakes, collecting, single_turn):
    collector = collecting(fakes.ScriptedSampler(), single_turn, batch_size=8, group_size=4)

    groups = collector.next_batch(0, 2, LONG)

    assert _indices(groups) == [0, 1]
    for group in groups:
        assert group.group_id == f"train/e0/{group.prompt_index:05d}"
        members = group.trajectories
        assert [t.sample_id for t in members] == [f"{group.group_id}/{i}" for i in range(4)]
        assert {t.prompt_index for t in members} == {group.prompt_index}
        assert {t.group_id for t in members} == {group.group_id}


def test_next_batch_members_of_a_group_are_no_clones(fakes, collecting, single_turn):
    sampler = fakes.ScriptedSampler(length=8)
    collector = collecting(sampler, single_turn, batch_size=8, group_size=8)

    (group,) = collector.next_batch(0, 1, LONG)

    assert len({t.tokens.tobytes() for t in group.trajectories}) == 8
    expected = {derive_seed(0, t.sample_id, 0) for t in group.trajectories}
    assert {seed for _, seed in sampler.requests} == expected


def test_next_batch_finished_in_any_order_groups_stay_whole(fakes, collecting, single_turn):
    # Report 2: groups gathered by position shift when samples finish out of order.
    sampler = fakes.ScriptedSampler()
    chaos = random.Random(1)

    async def before(tokens, params):
        await asyncio.sleep(chaos.random() * 0.02)

    sampler.before = before
    collector = collecting(sampler, single_turn, max_staleness=1, batch_size=16, group_size=4)

    groups = collector.next_batch(0, 4, LONG)

    for group in groups:
        assert {int(t.tokens[2]) for t in group.trajectories} == {group.prompt_index}
        assert [t.sample_id[-1] for t in group.trajectories] == ["0", "1", "2", "3"]


def test_eta_zero_dispatches_nothing_before_the_update(fakes, collecting, single_turn):
    # Report 18: synchronous by setting, one version late in fact.
    sampler, journal = fakes.ScriptedSampler(), fakes.Journal()
    collector = collecting(sampler, single_turn, ledger=journal)

    for version in range(4):
        groups = collector.next_batch(version, 2, LONG)
        time.sleep(0.02)
        assert len(journal.of("dispatched")) == 2 * (version + 1)
        assert _indices(groups) == [2 * version, 2 * version + 1]
        assert {v for g in groups for t in g.trajectories for v in t.versions[3:]} == {version}
        sampler.version = version + 1
        collector.set_version(version + 1)

    assert collector.metrics()["rollout/staleness_max"] == 0.0


def test_eta_two_runs_ahead_and_never_trains_on_older_tokens(fakes, collecting, single_turn):
    sampler, journal = fakes.ScriptedSampler(), fakes.Journal()
    chaos = random.Random(2)

    async def before(tokens, params):
        await asyncio.sleep(chaos.random() * 0.01)

    sampler.before = before
    collector = collecting(sampler, single_turn, max_staleness=2, ledger=journal)
    _wait_until(lambda: len(journal.of("accepted")) == 6, "three batches ahead")
    seen = []

    for version in range(8):
        groups = collector.next_batch(version, 2, LONG)
        seen += _indices(groups)
        versions = np.concatenate([t.versions[3:] for g in groups for t in g.trajectories])
        assert versions.min() >= version - 2
        assert versions.max() <= version
        sampler.version = version + 1
        collector.set_version(version + 1)

    assert len(set(seen)) == len(seen)


def test_next_batch_group_aged_in_the_queue_is_dropped_and_sampled_anew(
    fakes, collecting, single_turn
):
    # Report 3: finished episodes age in the queue and are trained on anyway.
    sampler, journal = fakes.ScriptedSampler(), fakes.Journal()
    collector = collecting(sampler, single_turn, max_staleness=1, ledger=journal)
    _wait_until(lambda: len(journal.of("accepted")) == 4, "two batches at version 0")
    sampler.version = 2
    collector.set_version(2)

    groups = collector.next_batch(2, 2, LONG)

    assert {v for g in groups for t in g.trajectories for v in t.versions[3:]} == {2}
    dropped = journal.of("dropped")
    assert sorted(e["prompt_index"] for e in dropped) == [0, 1, 2, 3]
    assert {(e["version"], e["oldest_version"]) for e in dropped} == {(2, 0)}
    assert collector.metrics()["rollout/dropped_stale"] == 4
    _wait_until(
        lambda: {e["prompt_index"] for e in journal.of("dispatched")[4:]} >= {0, 1, 2, 3},
        "the dropped prompts to be dispatched again",
    )
    # Dropped work is given back to admission: 16 trajectories may be alive at version 2.
    _wait_until(lambda: len(journal.of("dispatched")) == 4 + 16 // 2, "a full pipeline again")


def test_next_batch_takes_the_oldest_tokens_and_orders_by_prompt(fakes, collecting, single_turn):
    class Stamping(fakes.ScriptedSampler):
        async def sample(self, tokens, params):
            self.version = {2: 0}.get(int(tokens[2]), 1)
            return await super().sample(tokens, params)

    journal = fakes.Journal()
    collector = collecting(
        Stamping(), single_turn, max_staleness=1, start_version=1, ledger=journal
    )
    _wait_until(lambda: len(journal.of("accepted")) == 4, "two batches")

    assert _indices(collector.next_batch(1, 2, LONG)) == [0, 2]


def test_next_batch_token_from_the_future_is_stale_data_error(fakes, collecting, single_turn):
    sampler = fakes.ScriptedSampler()
    sampler.version = 1
    collector = collecting(sampler, single_turn)

    with pytest.raises(StaleDataError, match=r"train/e0/0000\d/0 holds a token of version 1"):
        collector.next_batch(0, 2, LONG)


def test_rejected_member_rejects_its_group_and_another_prompt_is_drawn(fakes, collecting):
    journal = fakes.Journal()

    def rule(completion, reference):
        return (
            fakes.Score(None, "timeout", "slow") if reference["answer"] == "1" else fakes.Score(1.0)
        )

    workflow = SingleTurn(fakes.ScriptedPool(rule), max_new_tokens=8)
    collector = collecting(fakes.ScriptedSampler(), workflow, ledger=journal)

    groups = collector.next_batch(0, 2, LONG)

    assert _indices(groups) == [0, 2]
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

    assert _indices(collector.next_batch(0, 2, LONG)) == [1, 2]
    _wait_until(lambda: sampler.cancelled == 1, "the cancellation of the second sample")


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

    assert _indices(groups) == [0, 1]
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

    assert _indices(collector.next_batch(0, 2, LONG)) == [0, 1]
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


def test_restart_from_frontier_dispatches_exactly_the_unconsumed(fakes, collecting, single_turn):
    # Report 9: prompts pulled ahead were forgotten by the checkpoint.
    sampler, journal = fakes.ScriptedSampler(), fakes.Journal()
    slow = {1, 4}
    gate = threading.Event()

    async def before(tokens, params):
        while int(tokens[2]) in slow and not gate.is_set():
            await asyncio.sleep(0.005)

    sampler.before = before
    first = collecting(sampler, single_turn, max_staleness=3, ledger=journal)
    _wait_until(lambda: len(journal.of("accepted")) >= 6, "what is not slow")
    consumed = _indices(first.next_batch(0, 2, LONG))
    state = json.loads(json.dumps(first.frontier()))
    first.close()

    journal = fakes.Journal()
    gate.set()
    second = collecting(
        fakes.ScriptedSampler(), single_turn, max_staleness=3, frontier=state, ledger=journal
    )
    for version in range(3):
        consumed += _indices(second.next_batch(version, 2, LONG))
        second.set_version(version + 1)

    assert consumed[:2] == [0, 2]
    assert state == {"next": 1, "beyond": [2]}
    dispatched = [e["prompt_index"] for e in journal.of("dispatched")]
    assert dispatched[:4] == [1, 3, 4, 5]
    assert sorted(consumed) == list(range(8))


def test_restart_samples_the_same_tokens_for_the_same_sample(fakes, collecting, single_turn):
    def first_batch(frontier):
        collector = collecting(fakes.ScriptedSampler(), single_turn, run_seed=5, frontier=frontier)
        return collector.next_batch(0, 2, LONG)

    one, two = first_batch(None), first_batch({"next": 0, "beyond": []})

    for left, right in zip(one, two, strict=True):
        for a, b in zip(left.trajectories, right.trajectories, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)


def test_resume_at_version_n_admits_no_burst(fakes, collecting, single_turn):
    journal, sampler = fakes.Journal(), fakes.ScriptedSampler()
    sampler.version = 50
    collector = collecting(sampler, single_turn, max_staleness=1, start_version=50, ledger=journal)

    collector.next_batch(50, 2, LONG)
    _wait_until(lambda: len(journal.of("accepted")) == 4, "two batches")
    time.sleep(0.02)

    assert len(journal.of("dispatched")) == 4


def test_pause_stops_dispatch_until_resume(fakes, collecting, single_turn):
    journal = fakes.Journal()
    collector = collecting(fakes.ScriptedSampler(), single_turn, ledger=journal)
    collector.next_batch(0, 2, LONG)
    collector.pause()
    collector.set_version(1)

    with pytest.raises(DeadlineError, match="the collector is paused"):
        collector.next_batch(1, 2, 0.05)
    collector.resume()

    # The sampler of this test still stamps version 0, which version 1 does not take.
    _wait_until(lambda: len(journal.of("dispatched")) >= 4, "dispatch after resume")


def test_close_with_running_episodes_cancels_them_and_ends_the_thread(
    fakes, collecting, single_turn
):
    sampler = fakes.ScriptedSampler()

    async def before(tokens, params):
        await asyncio.sleep(600)

    sampler.before = before
    collector = collecting(sampler, single_turn)
    _wait_until(lambda: len(sampler.requests) == 4, "all requests")

    collector.close()
    collector.close()

    assert sampler.cancelled == 4
    assert not collector._thread.is_alive()
    with pytest.raises(RolloutError, match="closed or never started"):
        collector.next_batch(0, 2, LONG)


def test_close_wakes_a_waiting_next_batch(fakes, collecting, single_turn):
    sampler = fakes.ScriptedSampler()

    async def before(tokens, params):
        await asyncio.sleep(600)

    sampler.before = before
    collector = collecting(sampler, single_turn)
    caught = []

    def wait():
        try:
            collector.next_batch(0, 2, LONG)
        except RolloutError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    _wait_until(lambda: len(sampler.requests) == 4, "all requests")
    collector.close()
    waiter.join(LONG)

    assert "closed" in str(caught[0])


def test_prompts_that_end_are_an_error_only_when_a_batch_cannot_be_filled(
    fakes, collecting, single_turn
):
    prompts = [fakes.make_prompt(i) for i in range(3)]
    collector = collecting(fakes.ScriptedSampler(), single_turn, prompts=prompts)

    assert _indices(collector.next_batch(0, 2, LONG)) == [0, 1]
    collector.set_version(1)
    with pytest.raises(DataError, match="the prompts ended"):
        collector.next_batch(1, 2, LONG)


def test_prompts_that_raise_fail_next_batch(fakes, collecting, single_turn):
    class Unreadable:
        def __getitem__(self, index):
            raise DataError(f"line {index} is no JSON")

    collector = collecting(fakes.ScriptedSampler(), single_turn, prompts=Unreadable())

    with pytest.raises(DataError, match="line 0 is no JSON"):
        collector.next_batch(0, 2, LONG)


def test_ledger_callback_that_fails_ends_the_collection(fakes, collecting, single_turn):
    def full(event, **fields):
        if event == "accepted":
            raise OutputError("the disk is full")

    collector = collecting(fakes.ScriptedSampler(), single_turn, ledger=full)

    with pytest.raises(OutputError, match="the disk is full"):
        collector.next_batch(0, 2, LONG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 3}, "batch_size=4 must be a multiple of group_size=3"),
        ({"group_size": 0}, "group_size=0"),
        ({"max_concurrent": 1}, "max_concurrent=1 must be at least group_size=2"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"episode_timeout_s": 0}, "episode_timeout_s=0"),
    ],
)
def test_collector_forbidden_number_is_config_error(
    fakes, collecting, single_turn, options, message
):
    with pytest.raises(ConfigError, match=message):
        collecting(fakes.ScriptedSampler(), single_turn, **options)


def test_next_batch_wrong_request_is_value_error(fakes, collecting, single_turn):
    collector = collecting(fakes.ScriptedSampler(), single_turn)

    with pytest.raises(ValueError, match="3 groups of 2 are not a batch of 4"):
        collector.next_batch(0, 3, LONG)
    with pytest.raises(ValueError, match="version 1, but set_version was last called with 0"):
        collector.next_batch(1, 2, LONG)


def test_ledger_events_of_a_group_come_in_order(fakes, collecting, single_turn):
    journal = fakes.Journal()
    collector = collecting(fakes.ScriptedSampler(), single_turn, max_staleness=1, ledger=journal)

    collector.next_batch(0, 2, LONG)

    by_prompt = collections.defaultdict(list)
    for event, fields in journal.entries:
        by_prompt[fields["prompt_index"]].append(event)
    assert by_prompt[0] == by_prompt[1] == ["dispatched", "accepted"]


def test_metrics_count_groups_and_staleness(fakes, collecting, single_turn):
    sampler, journal = fakes.ScriptedSampler(), fakes.Journal()
    collector = collecting(sampler, single_turn, max_staleness=1, ledger=journal)
    _wait_until(lambda: len(journal.of("accepted")) == 4, "two batches")
    collector.next_batch(0, 2, LONG)
    collector.pause()
    collector.set_version(1)
    collector.next_batch(1, 2, LONG)

    metrics = collector.metrics()

    assert metrics["rollout/staleness_mean"] == metrics["rollout/staleness_max"] == 1.0
    assert metrics["rollout/dispatched"] == metrics["rollout/accepted"] == 4
    assert metrics["rollout/consumed"] == 4
    assert metrics["rollout/queue"] == metrics["rollout/running"] == 0
    assert metrics["rollout/rejected"] == metrics["rollout/retried"] == 0

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
from rollout.collector_helpers import LONG, indices, wait_until

from jaxrl.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    OutputError,
    RolloutError,
    StaleDataError,
)
from jaxrl.rollout.workflow import derive_seed


def test_next_batch_whole_groups_in_prompt_order_with_identities(fakes, collecting, single_turn):
    collector = collecting(fakes.ScriptedSampler(), single_turn, batch_size=8, group_size=4)

    groups = collector.next_batch(0, 2, LONG)

    assert indices(groups) == [0, 1]
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
        assert indices(groups) == [2 * version, 2 * version + 1]
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
    wait_until(lambda: len(journal.of("accepted")) == 6, "three batches ahead")
    seen = []

    for version in range(8):
        groups = collector.next_batch(version, 2, LONG)
        seen += indices(groups)
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
    wait_until(lambda: len(journal.of("accepted")) == 4, "two batches at version 0")
    sampler.version = 2
    collector.set_version(2)

    groups = collector.next_batch(2, 2, LONG)

    assert {v for g in groups for t in g.trajectories for v in t.versions[3:]} == {2}
    dropped = journal.of("dropped")
    assert sorted(e["prompt_index"] for e in dropped) == [0, 1, 2, 3]
    assert {(e["version"], e["oldest_version"]) for e in dropped} == {(2, 0)}
    assert collector.metrics()["rollout/dropped_stale"] == 4
    wait_until(
        lambda: {e["prompt_index"] for e in journal.of("dispatched")[4:]} >= {0, 1, 2, 3},
        "the dropped prompts to be dispatched again",
    )
    # Dropped work is given back to admission: 16 trajectories may be alive at version 2.
    wait_until(lambda: len(journal.of("dispatched")) == 4 + 16 // 2, "a full pipeline again")


def test_next_batch_takes_the_oldest_tokens_and_orders_by_prompt(fakes, collecting, single_turn):
    class Stamping(fakes.ScriptedSampler):
        async def sample(self, tokens, params):
            self.version = {2: 0}.get(int(tokens[2]), 1)
            return await super().sample(tokens, params)

    journal = fakes.Journal()
    collector = collecting(
        Stamping(), single_turn, max_staleness=1, start_version=1, ledger=journal
    )
    wait_until(lambda: len(journal.of("accepted")) == 4, "two batches")

    assert indices(collector.next_batch(1, 2, LONG)) == [0, 2]


def test_next_batch_token_from_the_future_is_stale_data_error(fakes, collecting, single_turn):
    sampler = fakes.ScriptedSampler()
    sampler.version = 1
    collector = collecting(sampler, single_turn)

    with pytest.raises(StaleDataError, match=r"train/e0/0000\d/0 holds a token of version 1"):
        collector.next_batch(0, 2, LONG)


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
    wait_until(lambda: len(journal.of("accepted")) >= 6, "what is not slow")
    consumed = indices(first.next_batch(0, 2, LONG))
    state = json.loads(json.dumps(first.frontier()))
    first.close()

    journal = fakes.Journal()
    gate.set()
    second = collecting(
        fakes.ScriptedSampler(), single_turn, max_staleness=3, frontier=state, ledger=journal
    )
    for version in range(3):
        consumed += indices(second.next_batch(version, 2, LONG))
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
    wait_until(lambda: len(journal.of("accepted")) == 4, "two batches")
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
    wait_until(lambda: len(journal.of("dispatched")) >= 4, "dispatch after resume")


def test_close_with_running_episodes_cancels_them_and_ends_the_thread(
    fakes, collecting, single_turn
):
    sampler = fakes.ScriptedSampler()

    async def before(tokens, params):
        await asyncio.sleep(600)

    sampler.before = before
    collector = collecting(sampler, single_turn)
    wait_until(lambda: len(sampler.requests) == 4, "all requests")

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
    wait_until(lambda: len(sampler.requests) == 4, "all requests")
    collector.close()
    waiter.join(LONG)

    assert "closed" in str(caught[0])


def test_prompts_that_end_are_an_error_only_when_a_batch_cannot_be_filled(
    fakes, collecting, single_turn
):
    prompts = [fakes.make_prompt(i) for i in range(3)]
    collector = collecting(fakes.ScriptedSampler(), single_turn, prompts=prompts)

    assert indices(collector.next_batch(0, 2, LONG)) == [0, 1]
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
    wait_until(lambda: len(journal.of("accepted")) == 4, "two batches")
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

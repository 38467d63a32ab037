"""The consumed frontier: a restart dispatches exactly what was not settled."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.errors import CheckpointError
from jaxrl.rollout.frontier import Frontier, merged


def test_frontier_out_of_order_settling_keeps_the_gap():
    frontier = Frontier()
    taken = [frontier.take() for _ in range(5)]

    for index in (0, 2, 4):
        frontier.settle(index)

    assert taken == [0, 1, 2, 3, 4]
    assert frontier.state() == {"next": 1, "beyond": [2, 4]}


def test_take_prompt_given_back_comes_before_new_ones():
    frontier = Frontier()
    for _ in range(3):
        frontier.take()

    frontier.give_back(2)
    frontier.give_back(0)

    assert [frontier.take() for _ in range(3)] == [0, 2, 3]


@given(st.lists(st.tuples(st.sampled_from(["take", "settle", "back"]), st.integers(0, 9))))
def test_restart_dispatches_exactly_the_unsettled(steps):
    frontier, running, settled = Frontier(), [], set()
    for name, pick in steps:
        if name == "take":
            running.append(frontier.take())
        elif running:
            index = running.pop(pick % len(running))
            if name == "settle":
                frontier.settle(index)
                settled.add(index)
            else:
                frontier.give_back(index)

    restarted = Frontier(json.loads(json.dumps(frontier.state())))
    dispatched = [restarted.take() for _ in range(40)]

    assert settled.isdisjoint(dispatched)
    assert dispatched == sorted(set(range(max(dispatched) + 1)) - settled)


@pytest.mark.parametrize(
    "state",
    [{}, {"next": "x", "beyond": []}, {"next": -1, "beyond": []}, {"next": 3, "beyond": [3]}],
)
def test_frontier_malformed_state_is_checkpoint_error(state):
    with pytest.raises(CheckpointError, match="frontier"):
        Frontier(state)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40),
)
def test_frontiers_that_share_prompts_take_each_once_and_go_on_in_any_number(before, after, steps):
    shares = [Frontier(first=i, step=before) for i in range(before)]
    settled, running = set(), []
    for pick, done in steps:
        index = shares[pick % before].take()
        assert index % before == pick % before
        if done:
            shares[pick % before].settle(index)
            settled.add(index)
        else:
            running.append(index)

    whole = json.loads(json.dumps(merged([share.state() for share in shares])))
    restarted = [Frontier(whole, first=i, step=after) for i in range(after)]
    dispatched = sorted(share.take() for share in restarted for _ in range(80))

    assert not settled.intersection(running)
    assert len(set(dispatched)) == len(dispatched)
    low = min(max(d for d in dispatched if d % after == i) for i in range(after))
    assert [d for d in dispatched if d < low] == [i for i in range(low) if i not in settled]
    assert Frontier(whole).state() == whole


@pytest.mark.parametrize("share", [(2, 2), (-1, 2)])
def test_share_outside_its_number_is_refused(share):
    with pytest.raises(ValueError, match=r"first=-?\d must be at least 0 and below step=2"):
        Frontier(first=share[0], step=share[1])

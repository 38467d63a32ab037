"""The consumed frontier: a restart dispatches exactly what was not settled."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.errors import CheckpointError
from jaxrl.rollout.frontier import Frontier


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

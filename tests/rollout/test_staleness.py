"""The staleness bound: at admission over random schedules, and at consumption token by token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.errors import ConfigError, StaleDataError
from jaxrl.rollout.staleness import StalenessController, require_fresh
from jaxrl.types import TrajectoryGroup


def test_capacity_fresh_controller_is_eta_plus_one_batches():
    assert StalenessController(0, 8).capacity() == 8
    assert StalenessController(3, 8).capacity() == 32


def test_capacity_follows_versions_acceptance_and_rejection():
    controller = StalenessController(1, 4)
    assert [controller.admit(4), controller.admit(4), controller.admit(4)] == [True, True, False]

    controller.accept(4)
    assert controller.capacity() == 0
    controller.reject(4)
    assert controller.capacity() == 4
    controller.drop(4)
    assert controller.capacity() == 8
    controller.on_version(1)
    assert controller.capacity() == 8  # bounded by max_concurrent, which is (1 + 1) * 4


def test_capacity_max_concurrent_bounds_running_only():
    controller = StalenessController(4, 4, max_concurrent=4)

    assert controller.admit(4)
    assert controller.capacity() == 0
    controller.accept(4)
    assert controller.capacity() == 4


def test_admit_group_larger_than_capacity_is_not_split():
    controller = StalenessController(0, 6)

    assert controller.admit(4)
    assert not controller.admit(4)
    assert controller.running == 4


def test_capacity_after_resume_admits_no_burst():
    resumed = StalenessController(2, 8, start_version=100)

    assert resumed.capacity() == 3 * 8
    resumed.admit(24)
    resumed.accept(24)
    resumed.on_version(101)
    assert resumed.capacity() == 8


@pytest.mark.parametrize(
    "arguments", [(-1, 4), (0, 0), (0, 4, -1)], ids=["staleness", "batch", "version"]
)
def test_controller_forbidden_number_is_config_error(arguments):
    with pytest.raises(ConfigError, match="must be at least"):
        StalenessController(*arguments)


def test_on_version_going_back_is_refused():
    controller = StalenessController(0, 4, start_version=5)

    with pytest.raises(StaleDataError, match="version 4 is older than 5"):
        controller.on_version(4)


def test_check_consumption_one_old_token_makes_the_group_stale(fakes):
    fresh = fakes.make_group(version=4)
    versions = fresh.trajectories[1].versions.copy()
    versions[2] = 2
    aged = dataclasses.replace(fresh.trajectories[1], versions=versions)
    group = TrajectoryGroup("p0", 0, (fresh.trajectories[0], aged))
    controller = StalenessController(1, 2, start_version=4)

    assert controller.check_consumption(fresh, 4)
    assert controller.check_consumption(fresh, 5)
    assert not controller.check_consumption(group, 4)
    assert StalenessController(2, 2, start_version=4).check_consumption(group, 4)


def test_check_consumption_token_from_the_future_names_both_versions(fakes):
    controller = StalenessController(1, 2, start_version=4)

    with pytest.raises(StaleDataError, match=r"p0/0 holds a token of version 6.*holds version 5"):
        controller.check_consumption(fakes.make_group(version=6), 5)


def test_require_fresh_raises_only_outside_the_window():
    versions = np.array([[-1, 3, 4], [5, 9, -1]])
    mask = np.array([[False, True, True], [True, False, False]])

    require_fresh(versions, mask, 5, 2)
    require_fresh(versions, np.zeros_like(mask), 0, 0)
    with pytest.raises(StaleDataError, match=r"version 3 may not train version 5.*4 to 5"):
        require_fresh(versions, mask, 5, 1)
    with pytest.raises(StaleDataError, match="version 5 may not train version 4"):
        require_fresh(versions, mask, 4, 2)


STEPS = st.lists(st.sampled_from(["admit", "finish", "reject", "train"]), max_size=150)


class Simulation:
    """A run in miniature: groups of 2, batches of 4, tokens of the version at admission."""

    def __init__(self, eta: int, start: int, in_order: bool):
        self.controller = StalenessController(eta, 4, start, max_concurrent=100)
        self.eta, self.version, self.in_order = eta, start, in_order
        self.start = start
        self.running: list[int] = []
        self.ready: list[int] = []
        self.consumed: list[tuple[int, int]] = []
        self.dropped = 0

    def step(self, name: str, pick: int) -> None:
        getattr(self, f"_{name}")(0 if self.in_order else pick)
        bound = (self.eta + self.version + 1 - self.start) * 4
        assert self.controller.accepted + self.controller.running <= bound

    def _admit(self, pick: int) -> None:
        if self.controller.admit(2):
            self.running.append(self.version)

    def _finish(self, pick: int) -> None:
        if self.running:
            self.ready.append(self.running.pop(pick % len(self.running)))
            self.controller.accept(2)

    def _reject(self, pick: int) -> None:
        if self.running:
            self.running.pop(pick % len(self.running))
            self.controller.reject(2)

    def _train(self, pick: int) -> None:
        fresh = [v for v in self.ready if self.version - v <= self.eta]
        self.controller.drop(2 * (len(self.ready) - len(fresh)))
        self.dropped += len(self.ready) - len(fresh)
        self.ready = fresh
        if len(fresh) >= 2:
            self.consumed += [(v, self.version) for v in fresh[:2]]
            self.ready = fresh[2:]
            self.version += 1
            self.controller.on_version(self.version)


@settings(max_examples=150, deadline=None)
@given(eta=st.integers(0, 3), start=st.integers(0, 5), steps=STEPS, data=st.data())
def test_staleness_any_schedule_never_exceeds_eta(eta, start, steps, data):
    run = Simulation(eta, start, in_order=False)

    for name in steps:
        run.step(name, data.draw(st.integers(0, 7)))

    assert all(0 <= at - made <= eta for made, at in run.consumed)


@settings(max_examples=150, deadline=None)
@given(eta=st.integers(0, 3), start=st.integers(0, 5), steps=STEPS)
def test_staleness_work_finished_in_order_is_never_dropped(eta, start, steps):
    # Admission alone must suffice when nothing overtakes: otherwise it admits too much.
    run = Simulation(eta, start, in_order=True)

    for name in steps:
        run.step(name, 0)

    assert run.dropped == 0
    assert all(at - made <= eta for made, at in run.consumed)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, data=st.data())
def test_staleness_eta_zero_is_exactly_synchronous(steps, data):
    run = Simulation(0, 0, in_order=False)

    for name in steps:
        run.step(name, data.draw(st.integers(0, 7)))
        # Nothing is ever in flight that was admitted before the last update.
        assert set(run.running) | set(run.ready) <= {run.version}

    assert run.dropped == 0
    assert all(made == at for made, at in run.consumed)

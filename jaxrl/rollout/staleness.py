"""Bounds how old the tokens of a batch can be: at admission of work and again at consumption.

With B trajectories per update, staleness bound η and trainer version v, admission keeps
`accepted + running <= (η + v + 1 - start)·B`, where `start` is the version at which this
controller began (after a resume at version n, work done before does not count and none of it is
left, so counting starts at n; otherwise a burst of work that will be too old is admitted).
Source: AReaL (Fu et al. 2025), equation 3, with rejected and dropped work given back.
"""

from __future__ import annotations

import numpy as np

from jaxrl.errors import ConfigError, StaleDataError
from jaxrl.types import TrajectoryGroup


class StalenessController:
    """Counts trajectories; all of its methods are cheap and none of them waits.

    It holds no lock: its owner (the collector) calls it under its own.
    """

    def __init__(
        self,
        max_staleness: int,
        batch_size: int,
        start_version: int = 0,
        *,
        max_concurrent: int = 0,
    ):
        """`max_concurrent` bounds the trajectories running at once; 0: only staleness does."""
        for name, value, least in (
            ("max_staleness", max_staleness, 0),
            ("batch_size", batch_size, 1),
            ("start_version", start_version, 0),
            ("max_concurrent", max_concurrent, 0),
        ):
            if value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
        self.max_staleness = max_staleness
        self.batch_size = batch_size
        self.max_concurrent = max_concurrent or (max_staleness + 1) * batch_size
        self._start = start_version
        self._version = start_version
        self._accepted = 0
        self._running = 0

    @property
    def version(self) -> int:
        """The version that the trainer holds."""
        return self._version

    @property
    def running(self) -> int:
        """Trajectories admitted and not yet accepted or rejected."""
        return self._running

    @property
    def accepted(self) -> int:
        """Trajectories accepted since the start and not dropped again."""
        return self._accepted

    def check_group(self, group_size: int) -> None:
        """Raise `ConfigError` unless batches consist of whole groups and one may run."""
        if group_size < 1:
            raise ConfigError(f"group_size={group_size} must be at least 1")
        if self.batch_size % group_size:
            raise ConfigError(
                f"batch_size={self.batch_size} must be a multiple of group_size={group_size}"
            )
        if self.max_concurrent < group_size:
            raise ConfigError(
                f"max_concurrent={self.max_concurrent} must be at least group_size={group_size}: "
                "a group is dispatched whole"
            )

    def capacity(self) -> int:
        """How many more trajectories may be started now; can be negative or 0."""
        updates = self.max_staleness + self._version + 1 - self._start
        allowed = updates * self.batch_size - (self._accepted + self._running)
        return min(self.max_concurrent - self._running, allowed)

    def admit(self, n: int) -> bool:
        """Start a group of n trajectories if all of it fits; a group is never split."""
        if n > self.capacity():
            return False
        self._running += n
        return True

    def accept(self, n: int) -> None:
        """n running trajectories have finished and wait to be consumed."""
        self._take("running", n)
        self._accepted += n

    def reject(self, n: int) -> None:
        """n running trajectories gave nothing; others may start in their place."""
        self._take("running", n)

    def drop(self, n: int) -> None:
        """n accepted trajectories turned out too old; others may start in their place."""
        self._take("accepted", n)

    def on_version(self, version: int) -> None:
        """The trainer holds a new version. Versions never go back."""
        if version < self._version:
            raise StaleDataError(f"version {version} is older than {self._version}, held until now")
        self._version = version

    def _take(self, count: str, n: int) -> None:
        have = getattr(self, f"_{count}")
        if n > have:
            raise ValueError(f"{n} trajectories leave {count}, but only {have} are counted there")
        setattr(self, f"_{count}", have - n)

    def check_consumption(self, group: TrajectoryGroup, version: int) -> bool:
        """Whether every sampled token of the group is fresh enough to train `version`.

        Raises `StaleDataError` if a token comes from a later version than the trainer holds.
        """
        for trajectory in group.trajectories:
            newest = int(trajectory.versions[trajectory.loss_mask].max())
            if newest > version:
                raise StaleDataError(
                    f"{trajectory.sample_id} holds a token of version {newest}, but the trainer "
                    f"holds version {version}"
                )
        return version - oldest_version(group) <= self.max_staleness


def oldest_version(group: TrajectoryGroup) -> int:
    """The smallest version of any sampled token of the group."""
    return min(int(t.versions[t.loss_mask].min()) for t in group.trajectories)


def require_fresh(
    versions: np.ndarray, loss_mask: np.ndarray, version: int, max_staleness: int
) -> None:
    """versions int [...], loss_mask bool [...]: the last guard before an update of `version`.

    Raises `StaleDataError` unless version - max_staleness <= every masked version <= version.
    """
    held = np.asarray(versions)[np.asarray(loss_mask)]
    if held.size == 0:
        return
    oldest, newest = int(held.min()), int(held.max())
    if newest > version or oldest < version - max_staleness:
        bad = newest if newest > version else oldest
        raise StaleDataError(
            f"a token of version {bad} may not train version {version}: allowed are "
            f"{max(0, version - max_staleness)} to {version} (max_staleness={max_staleness})"
        )

"""Running totals of the collector, for the metrics and for error messages."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from jaxrl.types import TrajectoryGroup


@dataclasses.dataclass(slots=True)
class Counts:
    """Totals since the start of the collector, in groups unless said otherwise.

    `retried` counts episodes. The two staleness numbers are of the last batch, over its sampled
    tokens.
    """

    dispatched: int = 0
    accepted: int = 0
    dropped_stale: int = 0
    consumed: int = 0
    retried: int = 0
    rejected: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    staleness_mean: float = 0.0
    staleness_max: float = 0.0

    def measure(self, groups: list[TrajectoryGroup], version: int) -> None:
        """Take note of a consumed batch."""
        versions = np.concatenate(
            [t.versions[t.loss_mask] for group in groups for t in group.trajectories]
        )
        self.consumed += len(groups)
        self.staleness_mean = float((version - versions).mean())
        self.staleness_max = float((version - versions).max())

    def metrics(self) -> dict[str, float]:
        """Flat names under `rollout/`; one `rollout/rejected/<reason>` for each reason met."""
        values = {
            f"rollout/{f.name}": float(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.name != "rejected"
        }
        values["rollout/rejected"] = float(self.rejected.total())
        values |= {f"rollout/rejected/{why}": float(n) for why, n in self.rejected.items()}
        return values

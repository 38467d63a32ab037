"""How the processes of a run put their shares of a batch and of an evaluation together."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping

from jaxrl.orchestration import hosts
from jaxrl.orchestration.session import Session
from jaxrl.orchestration.trajectories import decode_trajectories, encode_trajectories
from jaxrl.types import TrajectoryGroup


def exchange_groups(
    collect: Callable[[], list[TrajectoryGroup]],
    update: int,
    digests: Mapping[int, str],
    session: Session,
) -> list[TrajectoryGroup]:
    """What `collect` gives on every process, in the order of the prompts, on every process.

    Signals may cut the waiting; then, and if `collect` raises, all processes raise.
    """
    if hosts.count() == 1:
        return collect()

    def encoded() -> bytes:
        with session.interrupts.released():
            groups = collect()
        return encode_trajectories(update, groups, digests)

    records = hosts.together("collecting a batch", encoded)
    groups = [group for data in records for group in decode_trajectories(io.BytesIO(data))[0]]
    return sorted(groups, key=lambda group: group.prompt_index)

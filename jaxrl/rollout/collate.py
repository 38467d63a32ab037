"""Turns whole groups into one packed batch of fixed shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.algorithms.advantages import group_relative
from jaxrl.algorithms.weights import token_weights
from jaxrl.data.packing import pack_sequences, rows_bound, rows_needed
from jaxrl.errors import ConfigError, DataError
from jaxrl.types import NO_VERSION, Trajectory, TrajectoryBatch, TrajectoryGroup


def collate(
    groups: Sequence[TrajectoryGroup],
    *,
    rows: int,
    row_length: int,
    normalisation: str = "token",
    normalize_std: bool = True,
) -> TrajectoryBatch:
    """Groups -> batch of `rows` rows of `row_length` tokens; the same groups give the same batch.

    Advantages are relative to the trajectory's own group. Raises `DataError` with the numbers if
    the groups do not fit; `rows_for` gives a number of rows that always suffices.
    """
    _check_fit(groups, rows, row_length)
    sequences = []
    for group in groups:
        rewards = np.array([t.reward for t in group.trajectories], np.float32)
        advantages = np.asarray(group_relative(rewards, normalize_std=normalize_std))
        sequences += [
            _sequence(trajectory, float(advantage))
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        ]
    packed = pack_sequences(sequences, rows=rows, row_length=row_length)
    mask, segment_ids = packed["loss_mask"], packed["segment_ids"]
    return TrajectoryBatch(
        tokens=packed["tokens"],
        positions=packed["positions"],
        segment_ids=segment_ids,
        loss_mask=mask,
        loss_weights=np.asarray(token_weights(mask, segment_ids, normalisation), np.float32),
        advantages=packed["advantages"],
        behavior_logp=packed["behavior_logp"],
        versions=np.where(mask, packed["versions"], NO_VERSION).astype(np.int32),
    )


def rows_for(
    batch_size: int, longest: int, row_length: int, *, micro_batches: int = 1, data_axes: int = 1
) -> int:
    """Rows that hold any `batch_size` sequences of up to `longest` tokens, whatever their lengths.

    The bound of `rows_bound`, rounded up to a multiple of `micro_batches` × `data_axes` (the
    number of devices among which rows are divided). Raises `ConfigError`.
    """
    if not 1 <= longest <= row_length:
        raise ConfigError(
            f"sequences of up to {longest} tokens do not fit rows of row_length={row_length}"
        )
    rows = rows_bound(batch_size, longest, row_length)
    multiple = micro_batches * data_axes
    return -(-rows // multiple) * multiple


def _check_fit(groups: Sequence[TrajectoryGroup], rows: int, row_length: int) -> None:
    if not groups:
        raise DataError("a batch needs at least one group, got 0")
    lengths = {t.sample_id: len(t.tokens) for group in groups for t in group.trajectories}
    longest = max(lengths, key=lambda sample_id: lengths[sample_id])
    if lengths[longest] > row_length:
        raise DataError(
            f"{longest} has {lengths[longest]} tokens, but rows hold row_length={row_length}"
        )
    needed = rows_needed(list(lengths.values()), row_length)
    if needed > rows:
        raise DataError(
            f"{len(lengths)} sequences of {sum(lengths.values())} tokens (longest "
            f"{lengths[longest]}) need {needed} rows of {row_length}, but the batch has {rows}"
        )


def _sequence(trajectory: Trajectory, advantage: float) -> dict[str, np.ndarray]:
    """Per-token arrays [T]; the advantage stands on sampled tokens only."""
    t = trajectory
    return {
        "tokens": t.tokens,
        "loss_mask": t.loss_mask,
        "behavior_logp": t.logprobs,
        "versions": t.versions,
        "advantages": np.where(t.loss_mask, np.float32(advantage), np.float32(0)),
    }

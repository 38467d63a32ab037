"""The file format in which the trajectories of one update are kept: one compressed .npz.

Per-token arrays are joined: `tokens`, `loss_mask`, `logprobs`, `versions`, all [N]; `offsets`
int64 [S + 1] cuts them into the S samples. `header` is JSON in UTF-8 (uint8 [H]):
`{"format": 1, "update", "digests": {version: digest}, "groups": [{"group_id", "prompt_index",
"samples": [{"sample_id", "reward", "finish_reason", "text"}]}]}`. No pickles.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxrl.errors import DataError
from jaxrl.types import Trajectory, TrajectoryGroup

FORMAT = 1
_FIELDS = {"tokens": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "versions": np.int32}


def encode_trajectories(
    update: int, groups: Sequence[TrajectoryGroup], digests: Mapping[int, str]
) -> bytes:
    """The content of a file; `digests` maps every version among the tokens to its digest."""
    samples = [t for group in groups for t in group.trajectories]
    used = sorted({int(v) for t in samples for v in np.unique(t.versions[t.loss_mask])})
    if missing := [v for v in used if v not in digests]:
        raise DataError(f"update {update} holds tokens of versions {missing} without a digest")
    header = {
        "format": FORMAT,
        "update": update,
        "digests": {str(v): digests[v] for v in used},
        "groups": [_describe(group) for group in groups],
    }
    arrays: dict[str, np.ndarray] = {
        name: np.concatenate([np.asarray(getattr(t, name), dtype) for t in samples])
        for name, dtype in _FIELDS.items()
    }
    lengths = [len(t.tokens) for t in samples]
    arrays["offsets"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def decode_trajectories(
    path: Path | str | IO[bytes],
) -> tuple[list[TrajectoryGroup], dict[int, str]]:
    """Groups, and version -> digest. Raises `DataError` if the file is missing or malformed."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (*_FIELDS, "offsets", "header")}
        header = json.loads(arrays["header"].tobytes())
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}, expected {FORMAT}")
        pieces = iter(zip(arrays["offsets"][:-1], arrays["offsets"][1:], strict=True))
        groups = [_restore(described, arrays, pieces) for described in header["groups"]]
    except (OSError, ValueError, KeyError, StopIteration, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a file of trajectories: {error!r}") from error
    return groups, {int(number): digest for number, digest in header["digests"].items()}


def _describe(group: TrajectoryGroup) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "prompt_index": group.prompt_index,
        "samples": [
            {
                "sample_id": t.sample_id,
                "reward": t.reward,
                "finish_reason": t.finish_reason,
                "text": t.text,
            }
            for t in group.trajectories
        ],
    }


def _restore(
    described: dict[str, Any], arrays: dict[str, np.ndarray], pieces: Any
) -> TrajectoryGroup:
    trajectories = []
    for sample in described["samples"]:
        start, end = next(pieces)
        trajectories.append(
            Trajectory(
                group_id=described["group_id"],
                prompt_index=described["prompt_index"],
                **sample,
                **{name: arrays[name][start:end] for name in _FIELDS},
            )
        )
    return TrajectoryGroup(described["group_id"], described["prompt_index"], tuple(trajectories))

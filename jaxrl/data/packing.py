"""Packing: sequences of different lengths side by side into rows of fixed length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.errors import DataError


def pack_sequences(
    sequences: Sequence[Mapping[str, np.ndarray]], *, rows: int, row_length: int
) -> dict[str, np.ndarray]:
    """n mappings of per-token arrays [length_i] -> arrays [rows, row_length] of the same names.

    Adds `positions` int32 (counted from 0 in each sequence) and `segment_ids` int32 (1, 2, … per
    row, 0 in padding). Padding is 0 (False) in every array. The placement is first fit, longest
    first, equal lengths in their given order: the same sequences always give the same rows.

    Raises `DataError` that names the sequence if it is empty, malformed, or does not fit.
    """
    if rows < 1 or row_length < 1:
        raise DataError(f"rows={rows} and row_length={row_length} must be at least 1")
    lengths = [_length(sequence, index) for index, sequence in enumerate(sequences)]
    placed = _first_fit(lengths, row_length)
    needed = 1 + max((row for row, _ in placed), default=-1)
    if needed > rows:
        index = next(i for i, (row, _) in enumerate(placed) if row >= rows)
        raise DataError(
            f"sequence {index} of {lengths[index]} tokens does not fit: {len(lengths)} sequences "
            f"of {sum(lengths)} tokens need {needed} rows of {row_length}, there are {rows}"
        )
    packed = _empty(sequences, rows, row_length)
    segments = [0] * rows
    for index in _by_length(lengths):
        row, start = placed[index]
        segments[row] += 1
        place = np.s_[row, start : start + lengths[index]]
        for name, values in sequences[index].items():
            packed[name][place] = values
        packed["positions"][place] = np.arange(lengths[index])
        packed["segment_ids"][place] = segments[row]
    return packed


def rows_needed(lengths: Sequence[int], row_length: int) -> int:
    """Number of rows that `pack_sequences` uses for sequences of these lengths, in this order.

    Raises `DataError` if one of them is empty or longer than a row.
    """
    return 1 + max((row for row, _ in _first_fit(lengths, row_length)), default=-1)


def rows_bound(count: int, longest: int, row_length: int) -> int:
    """A number of rows that holds any `count` sequences of up to `longest` tokens.

    First fit opens a row only when no row has room, that is when every row has less than `longest`
    tokens left; such a row holds at least row_length // longest sequences. Raises `DataError`.
    """
    if not 1 <= longest <= row_length:
        raise DataError(f"sequences of {longest} tokens do not fit into rows of {row_length}")
    return -(-count // (row_length // longest))


def _by_length(lengths: Sequence[int]) -> list[int]:
    """Indices, longest first; sorted() is stable, so ties keep their order."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _first_fit(lengths: Sequence[int], row_length: int) -> list[tuple[int, int]]:
    """(row, first column) of every sequence."""
    used: list[int] = []
    placed = [(0, 0)] * len(lengths)
    for index in _by_length(lengths):
        length = lengths[index]
        if not 1 <= length <= row_length:
            raise DataError(
                f"sequence {index} has {length} tokens; a row holds between 1 and {row_length}"
            )
        fits = (row for row, filled in enumerate(used) if filled + length <= row_length)
        row = next(fits, len(used))
        if row == len(used):
            used.append(0)
        placed[index] = (row, used[row])
        used[row] += length
    return placed


def _length(sequence: Mapping[str, np.ndarray], index: int) -> int:
    """Common length of the arrays of one sequence."""
    shapes = {name: np.shape(values) for name, values in sequence.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 1:
        raise DataError(f"sequence {index} must have 1-D arrays of one length, got {shapes}")
    reserved = {"positions", "segment_ids"} & shapes.keys()
    if reserved:
        raise DataError(f"sequence {index} has {sorted(reserved)}, which packing itself adds")
    return next(iter(shapes.values()))[0]


def _empty(
    sequences: Sequence[Mapping[str, np.ndarray]], rows: int, row_length: int
) -> dict[str, np.ndarray]:
    """Zeros of the names and dtypes of the first sequence, which all others must share."""
    dtypes: dict[str, np.dtype] = {}
    for index, sequence in enumerate(sequences):
        found = {name: np.asarray(values).dtype for name, values in sequence.items()}
        dtypes = dtypes or found
        if found != dtypes:
            raise DataError(f"sequence {index} has arrays {found}, the first one has {dtypes}")
    dtypes |= {"positions": np.dtype(np.int32), "segment_ids": np.dtype(np.int32)}
    return {name: np.zeros((rows, row_length), dtype) for name, dtype in dtypes.items()}

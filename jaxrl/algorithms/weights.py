"""How much each token counts in the loss. Host side: numpy in, numpy out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

NORMALISATIONS = ("token", "sequence")


def token_weights(
    mask: ArrayLike, segment_ids: ArrayLike, normalisation: str = "token"
) -> np.ndarray:
    """mask bool [R, T], segment_ids int [R, T] -> weights float32 [R, T], 0 outside the mask.

    They sum to 1 over the whole batch, so micro-batches and devices only have to add up their
    weighted losses. With N tokens in the mask and S sequences that have a token in it:

    "token"     1 / N: every token counts the same (DAPO, arXiv:2503.14476, section 3.3)
    "sequence"  1 / (S · tokens of its sequence): every sequence counts the same (GRPO)

    A sequence is one segment id (> 0) of one row. Raises ValueError for an unknown normalisation,
    unequal shapes, a token in the mask outside every segment, and an empty mask (a batch without
    a token to train on is a mistake upstream).
    """
    mask, segment_ids = np.asarray(mask), np.asarray(segment_ids)
    if normalisation not in NORMALISATIONS:
        raise ValueError(f"normalisation={normalisation!r} must be one of {NORMALISATIONS}")
    if mask.dtype != np.bool_ or mask.ndim != 2 or mask.shape != segment_ids.shape:
        raise ValueError(
            "mask must be bool [R, T] and segment_ids of the same shape, got "
            f"{mask.dtype} {mask.shape} and {segment_ids.shape}"
        )
    if not mask.any():
        raise ValueError(f"no token of the batch {mask.shape} is in the loss mask")
    if (segment_ids[mask] <= 0).any():
        raise ValueError("a token in the loss mask lies in padding (segment id 0)")
    if normalisation == "token":
        return np.where(mask, 1.0 / mask.sum(), 0.0).astype(np.float32)
    width = int(segment_ids.max()) + 1
    # One number for each (row, segment), so that one bincount finds all lengths.
    sequence = np.arange(mask.shape[0])[:, None] * width + segment_ids
    lengths = np.bincount(sequence[mask], minlength=mask.shape[0] * width)
    weights = 1.0 / (np.count_nonzero(lengths) * np.maximum(lengths[sequence], 1))
    return np.where(mask, weights, 0.0).astype(np.float32)

"""Advantages of whole trajectories. Host side: numpy in, numpy out, checked values."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def group_relative(
    rewards: ArrayLike, *, normalize_std: bool = True, eps: float = 1e-6
) -> np.ndarray:
    """rewards [n] of the n samples of one prompt -> advantages float32 [n].

    A_i = (r_i - mean(r)) / (std(r) + eps), with the population standard deviation (division by n);
    without `normalize_std`, A_i = r_i - mean(r), as in Dr. GRPO (Liu et al., arXiv:2503.20783).
    A group whose rewards are all equal teaches nothing: its advantages are exactly 0.
    Source: GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2.

    Raises ValueError for an empty group or a reward that is not finite.
    """
    r = np.asarray(rewards, np.float64)
    if r.ndim != 1 or r.size == 0:
        raise ValueError(f"rewards must be one-dimensional and not empty, got shape {r.shape}")
    if not np.isfinite(r).all():
        bad = int(np.flatnonzero(~np.isfinite(r))[0])
        raise ValueError(f"rewards must be finite, got rewards[{bad}]={r[bad]}")
    # Rounding makes mean(r) differ from r in the last bits even where all rewards are equal.
    if r.min() == r.max():
        return np.zeros(r.shape, np.float32)
    centred = r - r.mean()
    if normalize_std:
        centred = centred / (r.std() + eps)
    return centred.astype(np.float32)

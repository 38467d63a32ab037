"""Rotary positions, and the ways in which published models stretch them to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def rope_tables(
    positions: jax.Array, head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> tuple[jax.Array, jax.Array]:
    """positions [B, T] -> (cos, sin) float32 [B, T, H/2] of the angles position * theta^(-2i/H).

    Su et al. 2021, "RoFormer", eq. 15. Computed once for all layers. `scaling` is
    `ModelConfig.rope_scaling`: frequencies are multiplied by `frequency_factors`, cos and sin by
    `magnitude`.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling:
        frequencies *= frequency_factors(head_dim, theta, scaling)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    size = magnitude(scaling) if scaling else 1.0
    return jnp.cos(angles) * size, jnp.sin(angles) * size


def frequency_factors(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """By how much each of the H/2 rotary frequencies is slowed down; float32 [H/2].

    "linear": all by 1/factor (Chen et al. 2023, "Extending context window"). "llama3" (Llama 3.1):
    those that turn fewer than `low_freq_factor` times within the original length by 1/factor, those
    that turn more than `high_freq_factor` times not at all, and between them a straight line in the
    number of turns. "yarn" (Peng et al. 2023, section 3.2): the same with `beta_slow` and
    `beta_fast` turns, and the straight line in the index of the frequency.
    """
    slow = 1.0 / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return np.full(head_dim // 2, slow, np.float32)
    if scaling["rope_type"] == "yarn":
        share = 1.0 - _yarn_ramp(head_dim, theta, scaling)
    else:
        frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (slow + (1.0 - slow) * share).astype(np.float32)


def magnitude(scaling: Mapping[str, Any]) -> float:
    """What cos and sin are multiplied by: YaRN's sharper attention (eq. 22 there), else 1."""
    if scaling["rope_type"] != "yarn":
        return 1.0
    return scaling.get("attention_factor") or 0.1 * math.log(max(scaling["factor"], 1.0)) + 1.0


def _yarn_ramp(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """0 for frequencies that are kept, 1 for those that are slowed down fully; [H/2]."""

    def index(turns: float) -> float:
        """Of the frequency that turns so often within the original length."""
        length = scaling["original_max_position_embeddings"]
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(index(scaling.get("beta_fast") or 32.0)), 0)
    last = min(math.ceil(index(scaling.get("beta_slow") or 1.0)), head_dim - 1)
    return np.clip((np.arange(head_dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [B, T, N, H], cos and sin [B, T, H/2] -> x [B, T, N, H] with each pair (i, i + H/2) turned.

    The pairing of halves is the one of Llama's published weights.
    """
    cos = jnp.concatenate([cos, cos], axis=-1)[:, :, None]
    sin = jnp.concatenate([-sin, sin], axis=-1)[:, :, None]
    wide = x.astype(jnp.float32)
    # Rolling by half a head puts each number's partner in its place.
    turned = wide * cos + jnp.roll(wide, x.shape[-1] // 2, axis=-1) * sin
    return turned.astype(x.dtype)

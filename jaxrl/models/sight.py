"""What the layers of one call see: positions, masks, and what computes their attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxrl.models import attention as ops
from jaxrl.models.layers import Context, Sight
from jaxrl.models.rope import rope_tables
from jaxrl.models.splash import splash_fits
from jaxrl.models.spread import Spread

if TYPE_CHECKING:
    from jaxrl.config import ModelConfig


def row_context(
    config: ModelConfig,
    positions: jax.Array,
    segment_ids: jax.Array | None,
    spread: Spread | None,
) -> Context:
    """What layers need for rows of tokens that see themselves."""
    length = positions.shape[1]
    attention = choose_attention(spread, length)
    if attention == "plain":
        seen = sights(config, positions, functools.partial(ops.causal_mask, length, segment_ids))
        return Context(*seen, spread, causal=True)
    if segment_ids is None:
        segment_ids = jnp.ones_like(positions)
    # No device could hold what whole rows see.
    seen = sights(config, positions, lambda window=0: None)
    return Context(*seen, spread, attention=attention, segment_ids=segment_ids)


def choose_attention(spread: Spread | None, length: int) -> str:
    """What computes the attention of rows: "splash" on a TPU, "ring" where devices share the
    length, "plain" elsewhere."""
    if spread is None:
        return "plain"
    parts = spread.parts("length")
    if spread.platform == "tpu" and splash_fits(length, parts):
        return "splash"
    return "ring" if parts > 1 else "plain"


def sights(
    config: ModelConfig, positions: jax.Array, make_mask: Callable[..., jax.Array | None]
) -> tuple[Sight, Sight | None]:
    """What layers that see everything see, and those with a window (None: there are none)."""
    cos, sin = rope_tables(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    whole = Sight(cos, sin, make_mask())
    if not config.sliding_window:
        return whole, None
    if config.local_rope_theta:
        # These layers never look far: their positions are not stretched.
        cos, sin = rope_tables(positions, config.head_dim, config.local_rope_theta)
    window = config.sliding_window
    return whole, Sight(cos, sin, make_mask(window=window), window)

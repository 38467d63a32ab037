"""Gemma 3, text only: Gemma 2 with normed queries and keys in place of soft caps, more windows, and
positions of their own in these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxrl.config.families.family import (
    ATTENTION,
    HEAD_NORMS,
    MLP,
    Family,
    Record,
    number,
    read_rope,
    read_windows,
    whole,
)
from jaxrl.config.families.gemma2 import (
    ABSENT,
    FOUR_NORMS,
    GEMMA,
    ONLY,
    read_scales,
    write_scales,
)
from jaxrl.errors import ConfigError

if TYPE_CHECKING:
    from jaxrl.config.sections import ModelConfig


def _read(record: Record) -> dict[str, Any]:
    pattern = whole(record, "sliding_window_pattern", whole(record, "_sliding_window_pattern", 6))
    if pattern < 0:
        raise ConfigError(f"sliding_window_pattern={pattern} must be at least 0")
    windows = read_windows({"sliding_window": 4096, **record}, pattern)
    return {**read_scales(record, 0.0, 0.0), **windows, **_read_positions(record)}


def _read_positions(record: Record) -> dict[str, Any]:
    """In newer files each kind of layer has a record of its own."""
    rope = record.get("rope_parameters")
    if isinstance(rope, dict) and "full_attention" in rope:
        theta, scaling = read_rope(rope["full_attention"], 1e6)
        local, local_scaling = read_rope(rope.get("sliding_attention") or {}, 1e4)
    else:
        theta, scaling = read_rope(rope or record.get("rope_scaling") or {}, record["rope_theta"])
        local, local_scaling = number(record, "rope_local_base_freq", 1e4), {}
    if local_scaling:
        raise ConfigError(f"rope_type={local_scaling['rope_type']!r} of windows must be 'default'")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_scales(config),
        "sliding_window_pattern": config.global_every,
        "rope_local_base_freq": config.local_rope_theta or config.rope_theta,
    }


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    tensors={**FOUR_NORMS, **ATTENTION, **HEAD_NORMS, **MLP},
    fields={**GEMMA, "qk_norm": True},
    absent={**ABSENT, "rope_theta": 1e6},
    only=ONLY,
    read=_read,
    write=_write,
)

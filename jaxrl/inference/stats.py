"""What a driver has done, in numbers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class DriverStats:
    """A driver's counts. `busy_seconds` is the time its thread has spent on work.

    Of `prefix_tokens` in the prompts so far, `prefix_hit_tokens` were served from earlier prefills;
    `prefix_bytes` of at most `prefix_limit_bytes` hold them, `kv_bytes` the slots' caches.
    `expired` requests ran out of their time, `refused` ones found the queue full.
    """

    waiting: int
    running: int
    slots: int
    version: int
    live_versions: tuple[int, ...]
    finished: int
    cancelled: int
    tokens: int
    dispatches: int
    prefills: int
    prefix_hits: int
    recomputed: int
    compile_count: int
    busy_seconds: float
    prefix_tokens: int
    prefix_hit_tokens: int
    prefix_bytes: int
    prefix_limit_bytes: int
    prefix_evictions: int
    kv_bytes: int
    expired: int
    refused: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per busy second; 0 before the first."""
        return self.tokens / self.busy_seconds if self.busy_seconds else 0.0

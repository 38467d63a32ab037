"""What every benchmark shares: the model shape, and how CPU and wall time are taken."""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable

VOCAB, PROMPT, NEW_TOKENS, BATCH = 512, 32, 128, 16
SHAPE = {
    "n_layers": 4,
    "d_model": 256,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 64,
    "mlp_dim": 1024,
    "vocab_size": VOCAB,
    "max_length": 256,
}


def cpu_seconds() -> float:
    """User and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(work: Callable[[], int], repeats: int = 5) -> dict[str, float]:
    """Run `work` once to warm up, then `repeats` times; it returns the number of tokens it did.

    Medians of tokens per CPU-second and per second of wall time.
    """
    work()
    per_cpu, per_wall = [], []
    for _ in range(repeats):
        cpu, wall = cpu_seconds(), time.perf_counter()
        tokens = work()
        per_cpu.append(tokens / (cpu_seconds() - cpu))
        per_wall.append(tokens / (time.perf_counter() - wall))
    return {
        "tokens_per_cpu_second": round(statistics.median(per_cpu), 1),
        "tokens_per_wall_second": round(statistics.median(per_wall), 1),
    }


def emit(record: dict) -> None:
    """Print one JSON object."""
    print(json.dumps(record))

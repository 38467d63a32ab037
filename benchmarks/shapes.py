"""What every benchmark shares: the model shape, and how CPU and wall time are taken.

Needs nothing but numpy, because the peers' environments use it too.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence

VOCAB, PROMPT, NEW_TOKENS, BATCH = 512, 32, 128, 16
GROUPS, GROUP_SIZE = 4, 8
LENGTH = PROMPT + NEW_TOKENS
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
SMOLLM2 = {
    "n_layers": 30,
    "d_model": 576,
    "n_heads": 9,
    "n_kv_heads": 3,
    "head_dim": 64,
    "mlp_dim": 1536,
    "vocab_size": 49152,
    "max_length": 8192,
    "rope_theta": 100_000.0,
}
"""SmolLM2-135M, as the preset of that name."""
SMOLLM2_ROWS, SMOLLM2_LENGTH = 8, 128

Mark = tuple[float, float]


def now() -> Mark:
    """(CPU seconds of this process, all threads, user and system; seconds of wall time)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, time.perf_counter()


def measure(work: Callable[[], int], repeats: int = 5) -> dict[str, float]:
    """Run `work` once to warm up, then `repeats` times; it returns the number of tokens it did."""
    work()
    counts, marks = [], [now()]
    for _ in range(repeats):
        counts.append(work())
        marks.append(now())
    return summary(counts, marks)


def summary(counts: Sequence[int], marks: Sequence[Mark]) -> dict[str, float]:
    """Tokens of each repeat and the times around them -> medians of tokens per second."""
    pairs = list(itertools.pairwise(marks))
    rates = [
        (tokens / (end[0] - start[0]), tokens / (end[1] - start[1]))
        for tokens, (start, end) in zip(counts, pairs, strict=True)
    ]
    return {
        "tokens_per_cpu_second": round(statistics.median(rate[0] for rate in rates), 1),
        "tokens_per_wall_second": round(statistics.median(rate[1] for rate in rates), 1),
    }


def emit(record: dict) -> None:
    """Print one JSON object."""
    print(json.dumps(record), flush=True)

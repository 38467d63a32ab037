"""Useful tokens per second with lengths spread uniformly from 8 to 128: continuous or static batch.

`python benchmarks/mixed_lengths.py [--rounds N]`: 256 requests, prompts of 32 tokens, 16 slots of
one engine. A static batch runs until its longest request ends: 1890 steps for these lengths, where
full slots would need 1080, and the same prompts to prefill. 1.75 is the most that can be gained.
Prints JSON.
"""

from __future__ import annotations

import argparse
import statistics

import jax
import numpy as np
from sampler import make_driver, sample
from shapes import BATCH, emit, now

from jaxrl.inference.driver import Driver

LENGTHS = np.random.default_rng(0).permutation(np.linspace(8, 128, 256).astype(int)).tolist()


def continuous(driver: Driver) -> None:
    """All requests at once; slots are filled again as they become free."""
    sample(driver, LENGTHS, 1.0)


def static(driver: Driver) -> None:
    """The same requests in batches that all run for the longest of them."""
    for start in range(0, len(LENGTHS), BATCH):
        part = LENGTHS[start : start + BATCH]
        sample(driver, [max(part)] * len(part), 1.0)


def main() -> None:
    """Measure both in turn and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="tokens per slot and dispatch")
    parser.add_argument("--prefill-rows", type=int, default=4)
    args = parser.parse_args()
    works = {"continuous": continuous, "static": static}
    rates = {name: [] for name in works}
    with make_driver(BATCH, args.steps, args.prefill_rows) as driver:
        static(driver)
        for _ in range(args.rounds):
            for name, work in works.items():
                start = now()
                work(driver)
                spent = [end - begin for begin, end in zip(start, now(), strict=True)]
                rates[name].append([sum(LENGTHS) / seconds for seconds in spent])
    result = {"benchmark": "mixed_lengths", "jax": jax.__version__, "args": vars(args)}
    for i, kind in enumerate(("cpu", "wall")):
        pairs = zip(rates["continuous"], rates["static"], strict=True)
        result[f"useful_tokens_per_{kind}_second"] = {
            **{name: round(statistics.median(r[i] for r in rates[name]), 1) for name in works},
            "ratio": round(statistics.median(a[i] / b[i] for a, b in pairs), 2),
        }
    emit(result)


if __name__ == "__main__":
    main()

"""How long a running stream waits for its next token when a long prompt arrives.

`python benchmarks/stream_gaps.py [--prompt N] [--chunk N] [--repeats N]`: one stream runs, then a
prompt of N tokens comes. Measured are the longest gap between two of the stream's chunks while that
prompt is computed, and how long the prompt's own first token takes: with the whole prompt in one
call, and in pieces between dispatches. In turn, in one process. Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time

import jax
import numpy as np
from shapes import SHAPE, VOCAB, emit

from jaxrl.config import ModelConfig
from jaxrl.inference.driver import Driver
from jaxrl.inference.engine import Engine
from jaxrl.models.model import Model, build_model, init_params
from jaxrl.types import SamplingParams
from jaxrl.weights.digest import stamp

STREAM_TOKENS = 64
_RNG = np.random.default_rng(1)


def make_driver(model: Model, params: dict, length: int, chunk: int, budget: int | None) -> Driver:
    """A started driver of two slots without a prefix cache."""
    engine = Engine(
        model,
        slots=2,
        max_length=length,
        prefill_chunk=chunk,
        prefill_buckets=(16, chunk),
        attend_buckets=(128, length),
        prefill_rows=1,
    )
    bounds = {"prefix_cache_bytes": 0, "prefill_budget": budget}
    return Driver(engine, params, stamp(params, 0), **bounds).start()


def measure(driver: Driver, prompt_tokens: int) -> dict[str, float]:
    """Seconds: the stream's longest gap, its median gap, and the long prompt's first token."""
    prompt = _RNG.integers(0, VOCAB, prompt_tokens)
    moments, first = [], []
    running = driver.stream(_RNG.integers(0, VOCAB, 8), SamplingParams(STREAM_TOKENS))

    def read() -> None:
        for _ in running:
            moments.append(time.perf_counter())

    reader = threading.Thread(target=read)
    reader.start()
    while len(moments) < 2:
        time.sleep(0.001)
    asked = time.perf_counter()
    with driver.stream(prompt, SamplingParams(2)) as stream:
        next(stream)
        first.append(time.perf_counter() - asked)
    reader.join()
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    return {"longest_gap": max(gaps), "median_gap": statistics.median(gaps), "first": first[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=1536)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    length = args.prompt + STREAM_TOKENS + 16
    model = build_model(ModelConfig(**{**SHAPE, "max_length": length}))
    params = jax.device_put(init_params(model, 0), jax.devices()[0])
    drivers = {
        "whole": make_driver(model, params, length, args.prompt, None),
        "pieces": make_driver(model, params, length, args.chunk, args.chunk),
    }
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in drivers}
    for _ in range(args.repeats + 1):
        for name, driver in drivers.items():
            seen[name].append(measure(driver, args.prompt))
    results = {
        name: {
            f"{field}_ms": round(1000 * statistics.median(run[field] for run in runs[1:]), 1)
            for field in runs[0]
        }
        for name, runs in seen.items()
    }
    for driver in drivers.values():
        driver.stop()
    whole, pieces = results["whole"]["longest_gap_ms"], results["pieces"]["longest_gap_ms"]
    sizes = {"prompt": args.prompt, "chunk": args.chunk}
    ratio = round(whole / pieces, 2)
    emit({"benchmark": "stream_gaps", "jax": jax.__version__, **sizes, **results, "ratio": ratio})


if __name__ == "__main__":
    main()

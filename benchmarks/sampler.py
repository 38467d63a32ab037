"""Tokens per CPU-second of the sampler, log-probabilities and versions on.

`python benchmarks/sampler.py [--repeats N]`: batch 16, prompts of 32 tokens, 128 new tokens each,
greedy and at temperature 1, through the driver (continuous batching, futures and all). Prints JSON.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
from shapes import BATCH, LENGTH, NEW_TOKENS, PROMPT, SHAPE, VOCAB, emit, measure

from jaxrl.config import ModelConfig
from jaxrl.inference.driver import Driver
from jaxrl.inference.engine import Engine
from jaxrl.models.model import build_model, init_params
from jaxrl.types import SamplingParams
from jaxrl.weights.digest import stamp

_RNG = np.random.default_rng(1)


def make_driver(slots: int, steps: int, prefill_rows: int) -> Driver:
    """A started driver over random weights of the benchmark's shape."""
    model = build_model(ModelConfig(**SHAPE))
    params = jax.device_put(init_params(model, 0), jax.devices()[0])
    engine = Engine(
        model,
        slots=slots,
        max_length=LENGTH,
        prefill_buckets=(PROMPT,),
        steps_per_dispatch=steps,
        attend_buckets=(64, 96, 128),
        prefill_rows=prefill_rows,
    )
    return Driver(engine, params, stamp(params, 0)).start()


def sample(driver: Driver, lengths: list[int], temperature: float) -> int:
    """Submit one request per length and wait for all; returns the useful tokens.

    Prompts are new at each call: none is in the prefix cache.
    """
    prompts = _RNG.integers(0, VOCAB, (len(lengths), PROMPT))
    futures = [
        driver.submit(prompt, SamplingParams(int(length), temperature, seed=i))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    return sum(len(future.result().tokens) for future in futures)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="tokens per slot and dispatch")
    parser.add_argument("--prefill-rows", type=int, default=4)
    args = parser.parse_args()
    with make_driver(BATCH, args.steps, args.prefill_rows) as driver:
        whole = [NEW_TOKENS] * BATCH
        results = {
            "greedy": measure(lambda: sample(driver, whole, 0.0), args.repeats),
            "temperature_1": measure(lambda: sample(driver, whole, 1.0), args.repeats),
        }
    emit({"benchmark": "sampler", "jax": jax.__version__, **results})


if __name__ == "__main__":
    main()

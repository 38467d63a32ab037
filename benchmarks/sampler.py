"""Tokens per CPU-second of the sampler, log-probabilities and versions on.

`python benchmarks/sampler.py [--repeats N]`: batch 16, prompts of 32 tokens, 128 new tokens each,
greedy and at temperature 1, through the driver (continuous batching, futures and all); and lengths
spread uniformly from 8 to 128, against a static batch of the same engine. Prints JSON.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
from shapes import BATCH, NEW_TOKENS, PROMPT, SHAPE, VOCAB, emit, measure

from jaxrl.config import ModelConfig
from jaxrl.inference.driver import Driver
from jaxrl.inference.engine import Engine
from jaxrl.models.model import build_model, init_params
from jaxrl.types import SamplingParams
from jaxrl.weights.digest import stamp

UNIFORM_LENGTHS = np.random.default_rng(0).permutation(np.linspace(8, 128, 128).astype(int))


def make_driver(slots: int, steps: int) -> Driver:
    """A started driver over random weights of the benchmark's shape."""
    model = build_model(ModelConfig(**SHAPE))
    params = jax.device_put(init_params(model, 0), jax.devices()[0])
    engine = Engine(
        model,
        slots=slots,
        max_length=PROMPT + NEW_TOKENS,
        prefill_buckets=(PROMPT,),
        steps_per_dispatch=steps,
        prefill_rows=16,
    )
    return Driver(engine, params, stamp(params, 0)).start()


def sample(driver: Driver, lengths: list[int], temperature: float) -> int:
    """Submit one request per length and wait for all; returns the useful tokens."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, VOCAB, (len(lengths), PROMPT))
    futures = [
        driver.submit(prompt, SamplingParams(int(length), temperature, seed=i))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    return sum(len(future.result().tokens) for future in futures)


def static_batches(driver: Driver, lengths: list[int], temperature: float) -> int:
    """The same requests in batches of `slots` that all run for the longest; useful tokens."""
    for start in range(0, len(lengths), driver.engine.slots):
        part = lengths[start : start + driver.engine.slots]
        sample(driver, [max(part)] * len(part), temperature)
    return sum(lengths)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    with make_driver(BATCH, args.steps) as driver:
        whole = [NEW_TOKENS] * BATCH
        uniform = [int(n) for n in UNIFORM_LENGTHS]
        results = {
            "greedy": measure(lambda: sample(driver, whole, 0.0), args.repeats),
            "temperature_1": measure(lambda: sample(driver, whole, 1.0), args.repeats),
            "uniform_8_to_128": measure(lambda: sample(driver, uniform, 1.0), args.repeats),
            "uniform_static": measure(lambda: static_batches(driver, uniform, 1.0), args.repeats),
        }
    emit({"benchmark": "sampler", "jax": jax.__version__, **results})


if __name__ == "__main__":
    main()

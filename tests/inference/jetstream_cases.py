"""What the tests of JetStream's verbs share: options of the engine, and calls as of a driver."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from inference import later_jetstream

from jaxrl.inference.jetstream_results import read_records
from jaxrl.types import SamplingParams

LENGTH, SLOTS, CHUNK, TEMPERATURE = 48, 4, 16, 0.8
OPTIONS = {
    "slots": SLOTS,
    "max_length": LENGTH,
    "prefill_buckets": (8,),
    "prefill_chunk": CHUNK,
    "attend_buckets": (LENGTH,),
    "api": later_jetstream,
}


def padded(prompt) -> jax.Array:
    """As JetStream pads: to a power of two, int32 or int64, on the device."""
    size = max(16, 1 << (len(prompt) - 1).bit_length())
    return jnp.array(np.pad(np.asarray(prompt, np.int32), (0, size - len(prompt))))


def prefill(engine, weights, prompt, **options):
    return engine.prefill(
        params=weights, padded_tokens=padded(prompt), true_length=len(prompt), **options
    )


def seed_of(prefix, sample: int = 0) -> int:
    high, low = np.asarray(prefix.seeds)[sample].tolist()
    return (high << 32) + low


def decode(engine, weights, state, steps: int):
    """-> the state, and the records of each step."""
    records = []
    for _ in range(steps):
        state, result = engine.generate(weights, state)
        records.append(read_records(result))
    return state, records


def naive(tiny, prompt, seed: int, n: int, version: int = 0):
    return tiny.naive(prompt, SamplingParams(n, TEMPERATURE, seed), version)

"""What log-probabilities and version stamps cost in decoding.

`python benchmarks/logprob_overhead.py [--shape tiny|smollm2] [--repeats N]`: the engine as it is
against the same engine whose steps draw tokens and record nothing besides: no log-probability, no
softmax where sampling is greedy, no version. Random weights, the same tokens' work, in turn, in
one process. CPU-seconds; the ratio is the median over rounds. Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from shapes import SHAPE, emit, now

from jaxrl.config import ModelConfig, preset
from jaxrl.inference import sampling, steps
from jaxrl.inference.engine import Engine, Entry, Piece
from jaxrl.models.model import Model, build_model, init_params
from jaxrl.types import SamplingParams

PROMPT, STEPS, DISPATCHES = 16, 16, 4


def draw_alone(logits, how, position, *, alternatives=0):
    """`sampling.draw` for rows without top-k and top-p, without log-probabilities."""
    greedy = how.temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, how.temperature)[:, None]
    best = jnp.argmax(scaled, axis=-1)

    def sample():
        mass = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))
        drawn, _ = sampling._invert(mass, sampling._uniform(how.seed, position))
        return jnp.where(greedy, best, drawn)

    token = jax.lax.cond(jnp.all(greedy), lambda: best, sample).astype(jnp.int32)
    none = jnp.zeros((len(token), alternatives), jnp.int32)
    return sampling.Drawn(token, jnp.zeros(len(token)), none, none.astype(jnp.float32))


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Programs that are compiled meanwhile record nothing."""
    whole, advance = steps.draw, steps._advance

    def same_version(slots, alive, logits, version):
        return dataclasses.replace(advance(slots, alive, logits, version), version=slots.version)

    steps.draw, steps._advance = draw_alone, same_version
    try:
        yield
    finally:
        steps.draw, steps._advance = whole, advance


def make_engine(model: Model, slots: int) -> Engine:
    """An engine for one load, compiled."""
    length = PROMPT + STEPS * (DISPATCHES + 2)
    engine = Engine(
        model,
        slots=slots,
        max_length=length,
        prefill_buckets=(PROMPT,),
        attend_buckets=(length,),
        steps_per_dispatch=STEPS,
    )
    engine.warm_up(prefill_buckets=[PROMPT])
    return engine


def decode(engine: Engine, params: dict, temperature: float) -> float:
    """CPU-seconds of full dispatches of all slots, after one to warm up."""
    rng, state = np.random.default_rng(0), engine.init_state()
    for slot in range(engine.slots):
        piece = Piece(rng.integers(1, 400, PROMPT))
        prefix = engine.prefill(params, [piece], 0, state)
        how = SamplingParams(STEPS * (DISPATCHES + 1), temperature, seed=slot)
        state = engine.insert(prefix, state, [Entry(slot, 0, how)])
    mask = np.ones(engine.slots, bool)
    for dispatch in range(DISPATCHES + 1):
        if dispatch == 1:
            start = now()[0]
        state, result = engine.generate(
            params, state, version=0, mask=mask, longest=engine.max_length
        )
        np.asarray(result)
    return now()[0] - start


def compare(engines: dict[str, Engine], params: dict, temperature: float, repeats: int) -> dict:
    """Tokens per CPU-second of both, and how much longer the recording one takes."""
    rounds = [
        {name: decode(engine, params, temperature) for name, engine in engines.items()}
        for _ in range(repeats)
    ]
    tokens = engines["recording"].slots * STEPS * DISPATCHES
    rates = {
        name: round(tokens / statistics.median(times[name] for times in rounds), 1)
        for name in engines
    }
    overhead = statistics.median(times["recording"] / times["nothing"] for times in rounds) - 1
    return {"tokens_per_cpu_second": rates, "overhead_percent": round(100 * overhead, 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=["tiny", "smollm2"], default="tiny")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    config = ModelConfig(**SHAPE)
    if args.shape == "smollm2":
        config = dataclasses.replace(preset("smollm2-135m"), max_length=256)
    model = build_model(config)
    params = jax.device_put(init_params(model, 0), jax.devices()[0])
    engines = {"recording": make_engine(model, args.slots)}
    with unrecorded():
        engines["nothing"] = make_engine(model, args.slots)
    results = {
        name: compare(engines, params, temperature, args.repeats)
        for name, temperature in (("greedy", 0.0), ("temperature_1", 1.0))
    }
    sizes = {"shape": args.shape, "slots": args.slots}
    emit({"benchmark": "logprob_overhead", "jax": jax.__version__, **sizes, **results})


if __name__ == "__main__":
    main()

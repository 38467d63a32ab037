"""What log-probabilities and version stamps cost in decoding. Prints JSON.

`python benchmarks/logprob_overhead.py [--rounds N]`: dispatches of 16 steps of the engine as it is,
in turn with the same program that gives out tokens alone: neither their log-probability nor their
version is computed, kept or copied out. Shape of the other benchmarks (batch 16) and SmolLM2-135M
with random weights (batch 8), at temperature 1. Ratios of CPU and wall time, as recorded over not
recorded: [lowest, median, highest] over the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
from unittest import mock

import jax
import numpy as np
from shapes import BATCH, PROMPT, SHAPE, emit
from workers import ratios, timed

from jaxrl.config import ModelConfig, preset
from jaxrl.inference import steps
from jaxrl.inference.arguments import Entry, Piece
from jaxrl.inference.engine import Engine
from jaxrl.inference.state import DecodeState, Slots
from jaxrl.models.model import Model, build_model, init_params
from jaxrl.types import SamplingParams

STEPS, DISPATCHES = 16, 4
_ADVANCE, _GIVE_OUT = steps._advance, steps._give_out


def advance_without(slots: Slots, *rest: object) -> Slots:
    """Draws the next tokens and forgets what is known about them."""
    new = _ADVANCE(slots, *rest)
    drawn = new.drawn._replace(logp=slots.drawn.logp)
    return dataclasses.replace(new, drawn=drawn, version=slots.version)


def give_out_without(slots: Slots, mask: jax.Array) -> tuple:
    """Gives out token and valid alone."""
    given, alive, slots = _GIVE_OUT(slots, mask)
    return given.at[:, 2:].set(0), alive, slots


def make_engine(model: Model, batch: int, recorded: bool) -> Engine:
    """A compiled engine."""
    engine = Engine(
        model,
        slots=batch,
        max_length=PROMPT + STEPS * DISPATCHES,
        prefill_buckets=(PROMPT,),
        attend_buckets=(PROMPT + STEPS * DISPATCHES,),
        steps_per_dispatch=STEPS,
        prefill_rows=8,
    )
    if recorded:
        engine.warm_up()
    else:
        changes = {"_advance": advance_without, "_give_out": give_out_without}
        with mock.patch.multiple(steps, **changes):
            engine.warm_up()
    return engine


def filled(engine: Engine, params: dict) -> DecodeState:
    """A state with a prompt in every slot."""
    rng, state = np.random.default_rng(0), engine.init_state()
    rows = engine.rows_of(PROMPT)
    for first in range(0, engine.slots, rows):
        slots = range(first, min(first + rows, engine.slots))
        vocab = engine.model.config.vocab_size
        pieces = [Piece(rng.integers(0, vocab, PROMPT).astype(np.int32)) for _ in slots]
        prefix = engine.prefill(params, pieces, 0, state)
        how = SamplingParams(STEPS * DISPATCHES, 1.0)
        state = engine.insert(
            prefix, state, [Entry(slot, row, how) for row, slot in enumerate(slots)]
        )
    return jax.block_until_ready(state)


def decode(engine: Engine, params: dict) -> dict[str, float]:
    """CPU and wall seconds of all dispatches."""
    state = filled(engine, params)

    def work() -> None:
        nonlocal state
        for i in range(DISPATCHES):
            state, given = engine.generate(
                params,
                state,
                version=1,
                mask=np.ones(engine.slots, bool),
                longest=PROMPT + STEPS * (i + 1),
            )
            np.asarray(given)

    return timed(work)[1]


def overhead(config: ModelConfig, batch: int, rounds: int) -> dict[str, list[float]]:
    """As recorded over not recorded."""
    model = build_model(config)
    params = jax.device_put(init_params(model, 0), jax.devices()[0])
    engines = [make_engine(model, batch, recorded) for recorded in (False, True)]
    times = [[decode(engine, params) for engine in engines] for _ in range(rounds + 1)]
    return ratios(*([pair[i] for pair in times[1:]] for i in range(2)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    result = {
        "small_batch_16": overhead(ModelConfig(**SHAPE), BATCH, args.rounds),
        "smollm2_batch_8": overhead(preset("smollm2-135m"), 8, args.rounds),
    }
    emit({"benchmark": "logprob_overhead", "jax": jax.__version__, **result})


if __name__ == "__main__":
    main()

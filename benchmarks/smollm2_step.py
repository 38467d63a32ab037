"""A supervised update of SmolLM2-135M: 8 rows of 128 tokens, AdamW, float32. Prints JSON.

`python benchmarks/smollm2_step.py [--repeats N]`: tokens per second. With `--memory`: what the
compiled step holds at its peak against what it cannot do without, that is weights, gradients, two
moments, and the activations that `model.remat` keeps.
"""

from __future__ import annotations

import argparse
import math

import jax
import jax.extend
import numpy as np
from shapes import SMOLLM2_LENGTH as LENGTH
from shapes import SMOLLM2_ROWS as ROWS
from shapes import emit, measure

from jaxrl.config import SFTConfig, preset
from jaxrl.models.model import Model, build_model, init_params
from jaxrl.train.engine import TrainEngine
from jaxrl.train.objectives import sft_objective
from jaxrl.train.optimizer import make_optimizer
from jaxrl.types import TrajectoryBatch


def random_batch(vocab_size: int) -> TrajectoryBatch:
    """One sequence a row; every token but the first is trained on."""
    shape = (ROWS, LENGTH)
    mask = np.broadcast_to(np.arange(LENGTH) > 0, shape).copy()
    return TrajectoryBatch(
        tokens=np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32),
        positions=np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape).copy(),
        segment_ids=np.ones(shape, np.int32),
        loss_mask=mask,
        loss_weights=(mask / mask.sum()).astype(np.float32),
        advantages=np.zeros(shape, np.float32),
        behavior_logp=np.zeros(shape, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def make_engine(model: Model) -> TrainEngine:
    """AdamW without clipping, as the peer's plain loop has it."""
    optimizer = make_optimizer(SFTConfig(steps=100, grad_clip=0.0, schedule="constant"))
    return TrainEngine(model, init_params(model, 0), optimizer, sft_objective())


def memory(**changes: object) -> dict[str, float]:
    """Megabytes that the compiled step holds at its peak, and what it needs as written."""
    model = build_model(preset("smollm2-135m", **changes))
    engine, batch = make_engine(model), random_batch(model.config.vocab_size)
    arrays = engine._place(batch.arrays())
    step = engine._update.lower(engine.state, engine.frozen, arrays).compile()
    used = step.memory_analysis()
    peak = (
        used.argument_size_in_bytes
        + used.temp_size_in_bytes
        + used.output_size_in_bytes
        - used.alias_size_in_bytes
    )
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.params))
    kept = kept_activations(engine, {name: array[0] for name, array in arrays.items()})
    needed = 4 * weights + kept  # weights, gradients, two moments
    megabytes = {"weights": weights, "activations": kept, "needed": needed, "compiled": peak}
    record = {f"{name}_mb": round(value / 1e6, 1) for name, value in megabytes.items()}
    return {**record, "ratio": round(peak / needed, 2)}


def kept_activations(engine: TrainEngine, batch: dict[str, jax.Array]) -> int:
    """Bytes that the forward pass keeps for the backward pass, besides the weights."""

    def backward(params):
        objective = engine.objective
        return jax.vjp(lambda p: objective(engine.model, p, batch, mesh=engine.mesh)[0], params)[1]

    jaxpr = jax.make_jaxpr(backward)(engine.params).jaxpr
    given = {id(var) for var in (*jaxpr.invars, *jaxpr.constvars)}
    kept = {
        id(v): v.aval
        for v in jaxpr.outvars
        if id(v) not in given and not isinstance(v, jax.extend.core.Literal)
    }
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in kept.values())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="the memory, instead of the speed")
    args = parser.parse_args()
    if args.memory:
        # On CPU the compiler undoes rematerialisation where layers are unrolled.
        result = {"remat_none": memory(), "remat_full": memory(remat="full", scan_layers=True)}
        emit({"benchmark": "smollm2_step", "jax": jax.__version__, "memory": result})
        return
    model = build_model(preset("smollm2-135m"))
    engine, batch = make_engine(model), random_batch(model.config.vocab_size)

    def update() -> int:
        jax.block_until_ready(engine.update(batch))
        return ROWS * LENGTH

    result = {"smollm2_step": measure(update, args.repeats)}
    emit({"benchmark": "smollm2_step", "jax": jax.__version__, "args": vars(args), **result})


if __name__ == "__main__":
    main()

"""Tokens per CPU-second of a GRPO update: 32 rows of 160 tokens, AdamW, fp32. Prints JSON.

`python benchmarks/train_step.py [--repeats N] [--micro-batches M]`
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
from shapes import GROUP_SIZE, GROUPS, LENGTH, PROMPT, SHAPE, VOCAB, emit, measure

from jaxrl.config import AlgorithmConfig, ModelConfig, TrainConfig
from jaxrl.models.model import build_model, init_params
from jaxrl.train.engine import TrainEngine
from jaxrl.train.objectives import grpo_objective
from jaxrl.train.optimizer import make_optimizer
from jaxrl.types import TrajectoryBatch

ROWS = GROUPS * GROUP_SIZE


def random_batch() -> TrajectoryBatch:
    """One sequence a row: a prompt of 32 tokens and 128 that are trained on."""
    rng = np.random.default_rng(0)
    mask = np.broadcast_to(np.arange(LENGTH) >= PROMPT, (ROWS, LENGTH)).copy()
    return TrajectoryBatch(
        tokens=rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32),
        positions=np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)).copy(),
        segment_ids=np.ones((ROWS, LENGTH), np.int32),
        loss_mask=mask,
        loss_weights=(mask / mask.sum()).astype(np.float32),
        advantages=rng.normal(size=(ROWS, LENGTH)).astype(np.float32) * mask,
        behavior_logp=np.where(mask, -6.2, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=4)
    args = parser.parse_args()
    model = build_model(ModelConfig(**SHAPE))
    engine = TrainEngine(
        model,
        init_params(model, 0),
        make_optimizer(TrainConfig()),
        grpo_objective(AlgorithmConfig()),
        micro_batches=args.micro_batches,
    )
    batch = random_batch()

    def update() -> int:
        jax.block_until_ready(engine.update(batch))
        return ROWS * LENGTH

    result = {"train_step": measure(update, args.repeats)}
    emit({"benchmark": "train_step", "jax": jax.__version__, "args": vars(args), **result})


if __name__ == "__main__":
    main()

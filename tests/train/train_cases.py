"""A tiny model and batches for the tests of training."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import AlgorithmConfig, ModelConfig
from jaxrl.models.model import Model, build_model
from jaxrl.sharding import make_mesh
from jaxrl.train.engine import TrainEngine
from jaxrl.train.objectives import grpo_objective
from jaxrl.train.optimizer import adamw, make_schedule
from jaxrl.train.state import TrainState
from jaxrl.types import NO_VERSION, TrajectoryBatch
from jaxrl.weights.exchange import copy_to

VOCAB, ROWS, LENGTH = 32, 8, 12
LR, EPS = 0.01, 1e-3


@functools.cache
def tiny_model(**changes) -> Model:
    sizes = {
        "n_layers": 1,
        "d_model": 16,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "mlp_dim": 32,
        "vocab_size": VOCAB,
        "max_length": LENGTH,
    }
    return build_model(ModelConfig(**(sizes | changes)))


@functools.cache
def tiny_params(seed: int = 0):
    """Weights that no test may donate."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.3, 0.3, leaf.shape), leaf.dtype),
        tiny_model().abstract,
    )


def make_batch(seed: int = 0, *, rows: int = ROWS, unbalanced: bool = False) -> TrajectoryBatch:
    """Two sequences in each row and padding at its end; masks differ a lot when unbalanced."""
    rng = np.random.default_rng(seed)
    shape = (rows, LENGTH)
    segments = np.zeros(shape, np.int32)
    segments[:, :5], segments[:, 5:11] = 1, 2
    positions = np.zeros(shape, np.int32)
    positions[:, :5], positions[:, 5:11] = np.arange(5), np.arange(6)
    mask = (rng.random(shape) < 0.6) & (positions > 0)
    if unbalanced:
        mask[: rows // 2] = False
        mask[0, 1] = True
    weights = np.where(mask, rng.uniform(0.5, 1.5, shape), 0)
    return TrajectoryBatch(
        tokens=np.where(segments > 0, rng.integers(0, VOCAB, shape), 0).astype(np.int32),
        positions=positions,
        segment_ids=segments,
        loss_mask=mask,
        loss_weights=(weights / weights.sum()).astype(np.float32),
        advantages=rng.normal(size=shape).astype(np.float32),
        behavior_logp=np.where(mask, rng.uniform(-4, -2, shape), 0).astype(np.float32),
        versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
    )


def make_engine(**changes) -> TrainEngine:
    """A new engine on the tiny model; no clipping, and an eps so large that it does not
    blow up differences of rounding; unless changed."""
    arguments = {
        "optimizer": adamw(make_schedule("constant", learning_rate=LR), grad_clip=0, eps=EPS),
        "objective": grpo_objective(AlgorithmConfig(), logprob_chunk=8),
    }
    arguments |= changes
    model = arguments.pop("model", tiny_model())
    params = arguments.pop("params", tiny_params())
    return TrainEngine(
        model, params, arguments.pop("optimizer"), arguments.pop("objective"), **arguments
    )


@functools.cache
def _kept_engine(axes: tuple, micro_batches: int) -> tuple[TrainEngine, TrainState]:
    mesh = make_mesh(**dict(axes)) if axes else None
    engine = make_engine(mesh=mesh, micro_batches=micro_batches)
    return engine, copy_to(engine.state)


def reused_engine(micro_batches: int = 1, **axes: int) -> TrainEngine:
    """As `make_engine`, at its start, but one per layout for all tests: compiling is what takes
    long."""
    engine, start = _kept_engine(tuple(axes.items()), micro_batches)
    engine.restore(copy_to(start), version=0)
    return engine

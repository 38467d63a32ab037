"""The jitted train step: gradients of all micro-batches, one optimizer update, metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.models.lora import join_frozen, split_frozen
from jaxrl.models.model import Model
from jaxrl.sharding import DEFAULT_RULES, Rules
from jaxrl.train.objectives import Batch, Metrics, Objective
from jaxrl.train.optimizer import Optimizer
from jaxrl.train.state import TrainState, abstract_state, state_shardings

ROWS = (None, "batch", "length")
"""Logical axes of the arrays [M, R/M, T] of a batch."""

_FIELDS = {
    "tokens": jnp.int32,
    "positions": jnp.int32,
    "segment_ids": jnp.int32,
    "loss_mask": jnp.bool_,
    "loss_weights": jnp.float32,
    "advantages": jnp.float32,
    "behavior_logp": jnp.float32,
    "versions": jnp.int32,
}
"""The arrays of `TrajectoryBatch`, and their types."""

Step = Callable[[TrainState, Any, Batch], tuple[TrainState, dict[str, jax.Array]]]


def jit_step(
    model: Model,
    optimizer: Optimizer | optax.GradientTransformation,
    objective: Objective,
    *,
    mesh: Mesh,
    rules: Rules = DEFAULT_RULES,
) -> tuple[Any, TrainState]:
    """(the jitted step, the shardings of its state), as `TrainEngine` runs it; see `make_step`.

    Raises `ValueError` if the mesh cannot split the model.
    """
    abstract, _ = split_frozen(model.abstract)
    trained, _ = split_frozen(model.shardings(mesh, rules))
    shardings = state_shardings(abstract, trained, optimizer, mesh)
    step = make_step(
        model, optimizer, objective, mesh=mesh, rules=rules, param_shardings=shardings.params
    )
    out = (shardings, NamedSharding(mesh, PartitionSpec()))
    return jax.jit(step, donate_argnums=0, out_shardings=out), shardings


def lower_step(
    model: Model,
    optimizer: Optimizer | optax.GradientTransformation,
    objective: Objective,
    *,
    mesh: Mesh,
    rows: int,
    length: int,
    micro_batches: int = 1,
    rules: Rules = DEFAULT_RULES,
) -> jax.stages.Lowered:
    """The program of `TrainEngine.update` for batches [rows, length], without any weights.

    The devices of `mesh` may be those of a topology that nobody has.
    """
    jitted, shardings = jit_step(model, optimizer, objective, mesh=mesh, rules=rules)
    abstract, frozen = split_frozen(model.abstract)
    state = abstract_state(abstract, shardings, optimizer)
    _, frozen_to = split_frozen(model.shardings(mesh, rules))
    frozen = jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), frozen, frozen_to
    )
    batch = {
        name: jax.ShapeDtypeStruct(
            (micro_batches, rows // micro_batches, length),
            dtype,
            sharding=rules.sharding(mesh, ROWS),
        )
        for name, dtype in {**_FIELDS, **dict.fromkeys(objective.needs, jnp.float32)}.items()
    }
    return jitted.lower(state, frozen, batch)


def make_step(
    model: Model,
    optimizer: Optimizer | optax.GradientTransformation,
    objective: Objective,
    *,
    mesh: Mesh,
    rules: Rules,
    param_shardings: Any,
) -> Step:
    """(state, frozen weights, batch of [M, R/M, T]) -> (new state, metrics); to be jitted, the
    state donated.

    `param_shardings` are those of the weights that are trained. M micro-batches are worked through
    one after the other. If the loss or the gradient is not finite, the state comes back as it was
    and the metric "nonfinite" is 1.
    """

    def value_and_grad(frozen: Any, trained: Any, batch: Batch) -> tuple[Any, Metrics]:
        def loss(trained: Any) -> tuple[jax.Array, Metrics]:
            params = join_frozen(trained, frozen)
            return objective(model, params, batch, mesh=mesh, rules=rules)

        grads, metrics = jax.grad(loss, has_aux=True)(trained)
        # Gradients are left where their weights are: a reduce-scatter instead of an all-reduce.
        return jax.lax.with_sharding_constraint(grads, param_shardings), metrics

    def step(
        state: TrainState, frozen: Any, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        gradients = functools.partial(value_and_grad, frozen)
        grads, parts = accumulate(gradients, state.params, batch)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(parts.sums["loss"]) & jnp.isfinite(grad_norm)

        def apply(state: TrainState) -> TrainState:
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return TrainState(params, opt_state, state.step + 1)

        # A branch, not a choice between two results: that would go through all weights again.
        kept = jax.lax.cond(finite, apply, lambda state: state, state)
        metrics = finish_metrics(parts)
        metrics |= {"grad_norm": grad_norm, "nonfinite": 1.0 - finite.astype(jnp.float32)}
        if isinstance(optimizer, Optimizer):
            metrics["learning_rate"] = jnp.float32(optimizer.schedule(state.step))
        return kept, metrics

    return step


def accumulate(
    value_and_grad: Callable[[Any, Batch], tuple[Any, Metrics]], params: Any, batch: Batch
) -> tuple[Any, Metrics]:
    """Sums over the leading dimension of `batch`: gradients (of the params' dtypes) and metrics.

    Exact, because the weights of the tokens sum to 1 over all micro-batches: nothing is averaged.
    """
    count = batch["tokens"].shape[0]
    first = {name: array[0] for name, array in batch.items()}
    if count == 1:
        return value_and_grad(params, first)
    grads, metrics = jax.eval_shape(value_and_grad, params, first)
    # Small gradients must not vanish in a large sum of low precision.
    start = (
        jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.float32), grads),
        jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), metrics),
    )

    def add(total: tuple[Any, Metrics], batch: Batch) -> tuple[tuple[Any, Metrics], None]:
        grads, metrics = value_and_grad(params, batch)
        return (jax.tree.map(jnp.add, total[0], grads), total[1] + metrics), None

    (summed, metrics), _ = jax.lax.scan(add, start, batch)
    return jax.tree.map(lambda s, g: s.astype(g.dtype), summed, grads), metrics


def finish_metrics(parts: Metrics) -> dict[str, jax.Array]:
    """Means over the tokens of the loss, maxima, "loss" and "tokens"."""
    sums: Mapping[str, jax.Array] = parts.sums
    tokens = jnp.maximum(sums["tokens"], 1).astype(jnp.float32)
    means = {name: sums[name] / tokens for name in sums if name not in ("loss", "tokens")}
    return {"loss": sums["loss"], "tokens": sums["tokens"], **means, **parts.maxima}

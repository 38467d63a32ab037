"""AdamW with clipping by the global norm, and the course of the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import optax

from jaxrl.sharding.placement import path_name

if TYPE_CHECKING:
    from jaxrl.config import SFTConfig, TrainConfig

SCHEDULES = ("constant", "linear", "cosine")


class Optimizer(NamedTuple):
    """An `optax.GradientTransformation` that also tells its learning rate.

    `schedule` maps the number of updates done to the learning rate of the next one.
    """

    init: optax.TransformInitFn
    update: optax.TransformUpdateFn
    schedule: optax.Schedule


def make_optimizer(config: TrainConfig | SFTConfig, *, total_steps: int | None = None) -> Optimizer:
    """The optimizer of a config; the schedule ends at `total_steps` (None: `config.steps`)."""
    betas = {name: getattr(config, name) for name in ("b1", "b2", "eps") if hasattr(config, name)}
    schedule = make_schedule(
        config.schedule,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        total_steps=config.steps if total_steps is None else total_steps,
    )
    return adamw(schedule, grad_clip=config.grad_clip, weight_decay=config.weight_decay, **betas)


def adamw(
    schedule: optax.Schedule,
    *,
    grad_clip: float = 1.0,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019) on gradients scaled to a norm of at most `grad_clip`.

    `grad_clip` 0 means no clipping. Weights of norms ("scale") and biases ("…_bias") do not decay.
    """
    chain = [optax.clip_by_global_norm(grad_clip)] if grad_clip > 0 else []
    chain.append(
        optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_decays)
    )
    transform = optax.chain(*chain)
    return Optimizer(transform.init, transform.update, schedule)


def make_schedule(
    name: str, *, learning_rate: float, warmup_steps: int = 0, total_steps: int = 0
) -> optax.Schedule:
    """Learning rate by the number of updates done: a linear warm-up, then the course `name`.

    The warm-up rises to `learning_rate` in `warmup_steps` updates; the first has 1/warmup_steps of
    it, so that none is wasted. Then "constant", or "linear" or "cosine" down to 0 at `total_steps`.
    Raises `ValueError` for another name, and for a warm-up longer than a falling schedule.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} must be one of {', '.join(SCHEDULES)}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} must not be negative")
    rest = total_steps - warmup_steps
    if name != "constant" and total_steps and rest < 0:
        raise ValueError(f"warmup_steps={warmup_steps} must be at most total_steps={total_steps}")
    main = _course(name, learning_rate, max(rest, 1))
    if warmup_steps == 0:
        return main
    warmup = optax.linear_schedule(
        learning_rate / warmup_steps, learning_rate, max(warmup_steps - 1, 1)
    )
    return optax.join_schedules([warmup, main], [warmup_steps])


def _course(name: str, learning_rate: float, steps: int) -> optax.Schedule:
    if name == "constant":
        return optax.constant_schedule(learning_rate)
    if name == "linear":
        return optax.linear_schedule(learning_rate, 0.0, steps)
    return optax.cosine_decay_schedule(learning_rate, steps)


def _decays(params: Any) -> Any:
    """Tree of bool: True for the weights that weight decay acts on."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: not path_name(path).endswith(("/scale", "_bias")), params
    )

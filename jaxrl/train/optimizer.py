"""AdamW, or its factored kin, with clipping by the global norm; the course of the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
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
    schedule = make_schedule(
        config.schedule,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        total_steps=config.steps if total_steps is None else total_steps,
    )
    common = {"grad_clip": config.grad_clip, "weight_decay": config.weight_decay}
    if config.optimizer == "adafactor":
        return adafactor(schedule, **common)
    betas = {name: getattr(config, name) for name in ("b1", "b2", "eps") if hasattr(config, name)}
    return adamw(schedule, moment_dtype=config.moment_dtype, **common, **betas)


def adamw(
    schedule: optax.Schedule,
    *,
    grad_clip: float = 1.0,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    moment_dtype: str = "float32",
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019) on gradients scaled to a norm of at most `grad_clip`.

    `grad_clip` 0 means no clipping. Weights of norms ("scale") and biases ("…_bias") do not decay.
    Both moments are computed in float32 and kept in `moment_dtype`, whatever that of the weights.
    """
    moments = _kept_in(moment_dtype, optax.scale_by_adam(b1=b1, b2=b2, eps=eps))
    return _finished(moments, schedule, grad_clip, weight_decay)


def adafactor(
    schedule: optax.Schedule,
    *,
    grad_clip: float = 1.0,
    weight_decay: float = 0.0,
    smallest: int = 128,
) -> Optimizer:
    """Adafactor (Shazeer & Stern 2018) without a first moment, at the learning rate of `schedule`.

    Of the second moment only means over rows and over columns are kept, for weights whose two
    largest dimensions are at least `smallest`. An update's root mean square is at most 1 before
    the learning rate. Clipping and decay are those of `adamw`.
    """
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=smallest)
    moments = optax.chain(_kept_in("float32", factored), optax.clip_by_block_rms(1.0))
    return _finished(moments, schedule, grad_clip, weight_decay)


def _finished(
    moments: optax.GradientTransformation,
    schedule: optax.Schedule,
    grad_clip: float,
    weight_decay: float,
) -> Optimizer:
    """Clipping before `moments`, decay and learning rate behind."""
    clip = [optax.clip_by_global_norm(grad_clip)] if grad_clip > 0 else []
    decay = optax.add_decayed_weights(weight_decay, _decays)
    rest = optax.chain(moments, decay, optax.scale_by_learning_rate(schedule))
    transform = optax.chain(*clip, rest)
    return Optimizer(transform.init, transform.update, schedule)


def _kept_in(dtype: str, moments: optax.GradientTransformation) -> optax.GradientTransformation:
    """`moments` computed in float32, with their state kept in `dtype`."""

    def init(params: Any) -> Any:
        return _cast(moments.init(params), dtype)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = moments.update(_cast(grads, "float32"), _cast(state, "float32"), params)
        return updates, _cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _cast(tree: Any, dtype: str) -> Any:
    """The floating-point leaves in `dtype`; counters stay."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


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

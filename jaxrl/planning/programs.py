"""The programs of a run, lowered without weights, and what one run of each has to compute."""

from __future__ import annotations

import dataclasses
import math

import jax

from jaxrl.models.lora import split_frozen
from jaxrl.planning.layout import Layout
from jaxrl.train.step import lower_step

NAMES = ("train", "prefill", "decode")


@dataclasses.dataclass(frozen=True)
class Work:
    """What one run of a program is for: `tokens` on all devices together, the operations that the
    weights need for them (6ND for an update, 2ND else; N without the experts that a token does not
    meet), and a remark on what is counted. `steps`: how often its loop of unknown length runs."""

    tokens: int
    model_flops: float
    note: str
    steps: int = 1


def lower(layout: Layout, name: str) -> jax.stages.Lowered:
    """The program `name` of `NAMES`; allocates nothing. "prefill" is that of the longest prompts,
    "decode" that of the longest sequences."""
    engine = layout.engine if name != "train" else None
    if name == "prefill":
        return engine.lower("prefill", engine.prefill_buckets[-1])
    if name == "decode":
        return engine.lower("generate", engine.attend_buckets[-1])
    return lower_step(
        layout.model,
        layout.optimizer,
        layout.objective,
        mesh=layout.mesh,
        rows=layout.rows,
        length=layout.config.row_length,
        micro_batches=layout.micro_batches,
    )


def work_of(layout: Layout, name: str) -> Work:
    """What one run of the program `name` computes."""
    active = active_params(layout)
    if name == "train":
        tokens = layout.rows * layout.config.row_length
        trained = active
        if layout.config.model.lora_rank:
            trained = _count(split_frozen(layout.model.abstract)[0])
        # Forward, gradients of activations, gradients of the weights that are trained.
        flops = (4.0 * active + 2.0 * trained) * tokens
        return Work(tokens, flops, f"{layout.rows} rows of {layout.config.row_length} tokens")
    engine = layout.engine
    if name == "prefill":
        bucket = engine.prefill_buckets[-1]
        tokens, rows = engine.rows_of(bucket) * bucket, engine.rows_of(bucket)
        return Work(tokens, 2.0 * active * tokens, f"{rows} pieces of {bucket} tokens")
    steps = engine.steps_per_dispatch
    note = f"{steps} tokens for each of {engine.slots} slots of {engine.max_length} tokens"
    return Work(steps * engine.slots, 2.0 * active * engine.slots * steps, note, steps)


def active_params(layout: Layout) -> int:
    """Weights that take part in the products of one token."""
    config, model = layout.config.model, layout.model
    total = model.n_params
    if not config.tie_embeddings:
        # A row is looked up, which is no product.
        total -= config.vocab_size * config.d_model
    if config.n_experts:
        one = 3 * config.d_model * config.mlp_dim
        total -= config.n_layers * one * (config.n_experts - config.experts_per_token)
    return total


def _count(tree: object) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))

"""Memory of a run per device, from shapes and shardings alone: nothing is compiled or allocated.

State is exact. What a program needs besides is an estimate of what a compiler keeps: it errs by
tens of per cent, more where programs are tiny (docs/planning.md has the measured differences).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl.models.lora import split_frozen
from jaxrl.planning.layout import Layout
from jaxrl.sharding import DEFAULT_RULES, bytes_per_device
from jaxrl.train.state import abstract_state, state_shardings

_FLOAT = 4  # bytes of a float32


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes per device: `resident` as long as the run lasts, `programs` those that each program
    needs besides while it runs, by what they are for."""

    resident: Mapping[str, int]
    programs: Mapping[str, Mapping[str, int]]

    @property
    def peak(self) -> int:
        """What lies there all the time, and the hungriest program."""
        besides = (sum(parts.values()) for parts in self.programs.values())
        return sum(self.resident.values()) + max(besides, default=0)


def plan_memory(layout: Layout, *, kernel: bool = False) -> MemoryPlan:
    """The memory of a run of `layout.config`: training, sampling, and the copies of the weights
    that pass between them. `kernel`: training attends in a kernel that keeps no scores."""
    resident, programs = {}, {}
    weights = bytes_per_device(_weights(layout))
    trained = bytes_per_device(split_frozen(_weights(layout))[0])
    if layout.phase:
        state = _state(layout)
        resident["weights"] = weights
        resident["optimizer state"] = bytes_per_device(state.opt_state)
        programs["train"] = train_parts(layout, kernel=kernel)
    # The sampler serves a copy of what is trained; without training there is nothing else.
    resident["weights of the sampler"] = trained if layout.phase else weights
    resident["KV cache"] = bytes_per_device(layout.engine.abstract_state)
    if layout.phase == "rl":
        # The new version arrives while the old one is still served.
        programs["publish"] = {"new weights": trained}
        if layout.config.algorithm.kl_coef:
            offload = layout.config.algorithm.ref_offload
            resident["reference weights"] = 0 if offload else trained
            visit = {"visiting reference weights": trained} if offload else {}
            programs["reference"] = visit | forward_parts(layout, kernel=kernel)
    programs["prefill"] = prefill_parts(layout)
    programs["decode"] = decode_parts(layout)
    return MemoryPlan(resident, programs)


def train_parts(layout: Layout, *, kernel: bool = False) -> dict[str, int]:
    """Bytes that the train step needs besides its state, by what they are for."""
    sizes = _Sizes(layout)
    config = layout.config.model
    gradients = bytes_per_device(split_frozen(_weights(layout))[0])
    if layout.micro_batches > 1:
        gradients += gradients * _FLOAT // jnp.dtype(config.param_dtype).itemsize
    residual, inner, products = sizes.residual, sizes.layer_inner(kernel), sizes.layer_products()
    layers = config.n_layers
    kept = {
        "full": layers * residual,
        "dots": layers * (residual + products),
        "none": layers * (residual + inner),
    }[config.remat]
    return {
        "gradients": gradients,
        "activations kept": kept,
        # The backward pass of a layer has the layer's values and some of their gradients.
        "activations of a layer": inner + inner // 4,
        "gathered weights": sizes.gathered(),
        "logits": sizes.logits(),
    }


def forward_parts(layout: Layout, *, kernel: bool = False) -> dict[str, int]:
    """Bytes that log-probabilities of a batch need besides the weights."""
    sizes = _Sizes(layout)
    return {
        "activations of a layer": 2 * sizes.residual + sizes.layer_inner(kernel),
        "gathered weights": sizes.gathered(),
        "logits": sizes.logits() * 2 // 3,
    }


def prefill_parts(layout: Layout) -> dict[str, int]:
    """Bytes that a prefill needs besides weights and cache: every device group has all rows."""
    config, engine = layout.config.model, layout.engine
    bucket = engine.prefill_buckets[-1]
    rows, tensor = engine.rows_of(bucket), layout.mesh.shape["tensor"]
    item = jnp.dtype(config.dtype).itemsize
    width = config.d_model + 2 * config.mlp_dim // tensor
    scores = config.n_heads // tensor * bucket * _FLOAT
    kv = 2 * config.n_kv_heads // tensor * config.head_dim * item * config.n_layers
    logits = max(engine.prefill_rows) * config.vocab_size // tensor * _FLOAT
    return {
        "activations of a layer": rows * bucket * (width * item + scores),
        "new keys and values": rows * bucket * kv,
        "gathered weights": _Sizes(layout).gathered(),
        "logits": 2 * logits,
    }


def decode_parts(layout: Layout) -> dict[str, int]:
    """Bytes that decoding needs besides weights and cache."""
    engine, config = layout.engine, layout.config.model
    slots = engine.slots // layout.row_shards
    logits = slots * config.vocab_size // layout.mesh.shape["tensor"] * _FLOAT
    # What is attended to is cut out of the cache, unless it is all of it.
    cache = bytes_per_device(engine.abstract_state.cache)
    cut = cache if engine.attend_buckets[-1] < engine.cache_length else 0
    return {
        "attended cache": cut,
        "gathered weights": _Sizes(layout).gathered(),
        "logits": 4 * logits,
    }


class _Sizes:
    """Bytes of the parts of one micro-batch's forward pass on one device."""

    def __init__(self, layout: Layout):
        self.model, self.config = layout.model, layout.config.model
        self.mesh = layout.mesh.shape
        self.item = jnp.dtype(self.config.dtype).itemsize
        rows = layout.rows // layout.micro_batches if layout.phase else 0
        self.rows = rows // layout.row_shards
        self.length = layout.config.row_length // self.mesh["context"]
        self.whole_length = layout.config.row_length
        self.tokens = self.rows * self.length
        self.chunk = max(1, layout.config.train.logprob_chunk // max(rows, 1)) * self.rows

    @property
    def residual(self) -> int:
        """The stream between two layers."""
        return self.tokens * self.config.d_model * self.item

    def layer_products(self) -> int:
        """What the products with the weights of one layer give."""
        config, tensor = self.config, self.mesh["tensor"]
        heads = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim // tensor
        return self.tokens * self.item * (heads + 2 * config.d_model + 2 * self._mlp_width())

    def layer_inner(self, kernel: bool) -> int:
        """What the forward pass of one layer makes."""
        config, tensor = self.config, self.mesh["tensor"]
        heads = (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_dim // tensor
        wide = heads + 4 * config.d_model + 3 * self._mlp_width()
        scores = 0
        if not kernel:
            pairs = self.rows * self.length * self.whole_length
            scores = pairs * max(1, config.n_heads // tensor) * (_FLOAT + self.item)
        return self.tokens * self.item * wide + scores

    def gathered(self) -> int:
        """Weights that are whole for their use: two layers' (the next one is fetched meanwhile),
        and a table of the vocabulary."""
        if self.mesh["fsdp"] == 1:
            return 0
        config, kept = self.config, DEFAULT_RULES.replace({"embed": None})
        sharded = _bytes_under(self.model, kept, self.mesh)
        table = config.vocab_size * config.d_model // self.mesh["tensor"]
        tables = table * (1 if config.tie_embeddings else 2)
        layer = (sharded - tables) // config.n_layers
        return (2 * layer + table) * self.item

    def logits(self) -> int:
        """Of one chunk: the logits, their probabilities, and the gradient of either."""
        return 3 * self.chunk * self.config.vocab_size // self.mesh["tensor"] * _FLOAT

    def _mlp_width(self) -> int:
        config, mesh = self.config, self.mesh
        width = config.mlp_dim // mesh["tensor"]
        if not config.n_experts:
            return width
        # Each token meets its experts, wherever they are; balanced, every device has its share.
        return config.experts_per_token * width // mesh["expert_tensor"]


def _bytes_under(model, rules, mesh) -> int:
    """Number of weights on a device under `rules`."""
    axes = model.axes
    leaves, treedef = jax.tree.flatten(model.abstract)
    total = 0
    for leaf, names in zip(leaves, treedef.flatten_up_to(axes), strict=True):
        split = math.prod(
            mesh[axis]
            for name in names
            if name is not None
            for axis in _mesh_axes(rules.mapping[name])
        )
        total += math.prod(leaf.shape) // split
    return total


def _mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _weights(layout: Layout):
    shardings = layout.model.shardings(layout.mesh)
    return jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        layout.model.abstract,
        shardings,
    )


def _state(layout: Layout):
    trained, _ = split_frozen(layout.model.abstract)
    to, _ = split_frozen(layout.model.shardings(layout.mesh))
    shardings = state_shardings(trained, to, layout.optimizer, layout.mesh)
    return abstract_state(trained, shardings, layout.optimizer)

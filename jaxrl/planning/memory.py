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
from jax.sharding import AbstractMesh, Mesh

from jaxrl.models.lora import split_frozen
from jaxrl.models.model import Model
from jaxrl.planning.layout import Layout
from jaxrl.sharding import DEFAULT_RULES, bytes_per_device
from jaxrl.train.state import abstract_state, state_shardings

_FLOAT = 4  # bytes of a float32
_ROOM = 1.5  # of the buckets of tokens for experts, in even shares


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
    placed = _weights(layout.model, layout.mesh)
    weights, trained = bytes_per_device(placed), bytes_per_device(split_frozen(placed)[0])
    if layout.phase:
        state = _state(layout)
        resident["weights"] = weights
        resident["optimizer state"] = bytes_per_device(state.opt_state)
        programs["train"] = train_parts(layout, kernel=kernel)
    # Samplers in processes of their own have devices of their own.
    here = not (layout.phase == "rl" and layout.config.rollout.samplers)
    sampled, passing = _sampled(layout) if here else (0, {})
    resident["weights of the sampler"] = sampled
    resident["KV cache"] = here * bytes_per_device(layout.engine.abstract_state)
    if layout.phase == "rl" and here:
        # The new version arrives while the old one is still served.
        programs["publish"] = passing
    if layout.phase == "rl" and layout.config.algorithm.kl_coef:
        offload = layout.config.algorithm.ref_offload
        resident["reference weights"] = 0 if offload else trained
        visit = {"visiting reference weights": trained} if offload else {}
        programs["reference"] = visit | forward_parts(layout, kernel=kernel)
    if here:
        programs["prefill"] = prefill_parts(layout)
        programs["decode"] = decode_parts(layout)
    return MemoryPlan(resident, programs)


def _sampled(layout: Layout) -> tuple[int, dict[str, int]]:
    """Bytes of the sampler's copy of the weights, and of what there is besides while a new one
    arrives."""
    whole = _weights(layout.served_model, layout.sampler_mesh)
    copied = bytes_per_device(split_frozen(whole)[0])
    # Frozen weights are shared where they lie in the same way.
    shared = layout.phase and layout.sampler_mesh == layout.mesh
    kept = copied if shared else bytes_per_device(whole)
    passing = {"new weights": copied}
    before, after = layout.model.abstract, layout.served_model.abstract
    if not shared and before != after:
        narrow = _weights(layout.served_model, layout.mesh)
        passing["cast weights"] = bytes_per_device(split_frozen(narrow)[0])
    return kept, passing


def train_parts(layout: Layout, *, kernel: bool = False) -> dict[str, int]:
    """Bytes that the train step needs besides its state, by what they are for."""
    sizes = _Sizes(layout, layout.mesh)
    config = layout.config.model
    gradients = bytes_per_device(split_frozen(_weights(layout.model, layout.mesh))[0])
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
        "their gradients": sizes.gathered_gradients(),
        "logits": sizes.logits(),
    }


def forward_parts(layout: Layout, *, kernel: bool = False) -> dict[str, int]:
    """Bytes that log-probabilities of a batch need besides the weights."""
    sizes = _Sizes(layout, layout.mesh)
    return {
        "activations of a layer": 2 * sizes.residual + sizes.layer_inner(kernel),
        "gathered weights": sizes.gathered(),
        "logits": sizes.logits() * 2 // 3,
    }


def prefill_parts(layout: Layout) -> dict[str, int]:
    """Bytes that a prefill needs besides weights and cache: every device group has all rows."""
    config, engine = layout.config.model, layout.engine
    bucket = engine.prefill_buckets[-1]
    rows, tensor = engine.rows_of(bucket), layout.sampler_mesh.shape["tensor"]
    item = jnp.dtype(config.dtype).itemsize
    width = config.d_model + 2 * config.mlp_dim // tensor
    scores = config.n_heads // tensor * bucket * _FLOAT
    kv = 2 * config.n_kv_heads // tensor * config.head_dim * item * config.n_layers
    logits = max(engine.prefill_rows) * config.vocab_size // tensor * _FLOAT
    return {
        "activations of a layer": rows * bucket * (width * item + scores),
        "new keys and values": rows * bucket * kv,
        "gathered weights": _Sizes(layout, layout.sampler_mesh).gathered(),
        "logits": 2 * logits,
    }


def decode_parts(layout: Layout) -> dict[str, int]:
    """Bytes that decoding needs besides weights and cache."""
    engine, config = layout.engine, layout.config.model
    mesh = layout.sampler_mesh
    slots = engine.slots // DEFAULT_RULES.shards(mesh, "slots")
    logits = slots * config.vocab_size // mesh.shape["tensor"] * _FLOAT
    # What is attended to is cut out of the cache, unless it is all of it.
    cache = bytes_per_device(engine.abstract_state.cache)
    cut = cache if engine.attend_buckets[-1] < engine.cache_length else 0
    return {
        "attended cache": cut,
        "gathered weights": _Sizes(layout, mesh).gathered(),
        "logits": 4 * logits,
    }


class _Sizes:
    """Bytes of the parts of one micro-batch's forward pass on one device."""

    def __init__(self, layout: Layout, mesh: Mesh | AbstractMesh):
        self.layout, self.config, self.mesh = layout, layout.model.config, mesh
        self.item = jnp.dtype(self.config.dtype).itemsize
        rows = layout.rows // layout.micro_batches if layout.phase else 0
        self.rows = rows // layout.row_shards
        self.whole_length = layout.config.row_length
        self.length = self.whole_length // self.split("length")
        self.tokens = self.rows * self.length
        # As `logprobs_on_mesh` has it: at most all that the rows on a device hold.
        width = layout.config.train.logprob_chunk // max(rows * self.split("length"), 1)
        self.chunk = min(self.length, max(1, width)) * self.rows

    def split(self, axis: str) -> int:
        """Among how many devices a logical axis is divided."""
        return DEFAULT_RULES.shards(self.mesh, axis)

    @property
    def residual(self) -> int:
        """The stream between two layers."""
        tokens = self.rows * self.whole_length // self.split("residual")
        return tokens * self.config.d_model * self.item

    def layer_products(self) -> int:
        """What the products with the weights of one layer give."""
        config = self.config
        heads = config.n_heads // self.split("heads") + 2 * config.n_kv_heads // self.split(
            "kv_heads"
        )
        inner = self.tokens * self.item * (heads * config.head_dim + 2 * self._mlp_width())
        return inner + 2 * self.residual

    def layer_inner(self, kernel: bool) -> int:
        """What the forward pass of one layer makes."""
        config = self.config
        heads = config.n_heads // self.split("heads")
        kv_heads = config.n_kv_heads // self.split("kv_heads")
        wide = 2 * (heads + kv_heads) * config.head_dim + 3 * self._mlp_width()
        # The stream is whole before products that `tensor` splits, and in parts between them.
        wide += 2 * config.d_model
        if config.n_experts:
            # Buckets of tokens: those that are sent, those that arrive, and both answers.
            wide += int(4 * _ROOM * config.experts_per_token) * config.d_model
        scores = 0
        if not kernel:
            pairs = self.rows * self.length * self.whole_length
            scores = pairs * heads * (_FLOAT + self.item)
        return self.tokens * self.item * wide + 2 * self.residual + scores

    def gathered(self) -> int:
        """Weights that are whole for their use: two layers' (the next one is fetched meanwhile),
        and the tables of the vocabulary."""
        if self.split("embed") == 1:
            return 0
        return (2 * self._layer_weights() + self._tables()) * self.item

    def gathered_gradients(self) -> int:
        """Gradients of weights that are whole, before each device keeps its part: those of a table
        are summed in float32."""
        if self.split("embed") == 1:
            return 0
        return self._layer_weights() * self.item + self._tables() * _FLOAT

    def logits(self) -> int:
        """Of one chunk: the logits, their probabilities, and the gradient of either."""
        return 3 * self.chunk * self.config.vocab_size // self.split("vocab") * _FLOAT

    def _tables(self) -> int:
        """Numbers of the token embedding on a device that has its width, and of the output
        projection where that is another one."""
        one = self.config.vocab_size * self.config.d_model // self.split("vocab")
        return one if self.config.tie_embeddings else 2 * one

    def _layer_weights(self) -> int:
        """Numbers of one layer on a device that has its whole width."""
        model, whole = self.layout.model, {"embed": 1, "expert_embed": 1}
        leaves, treedef = jax.tree.flatten(model.abstract)
        total = 0
        for leaf, names in zip(leaves, treedef.flatten_up_to(model.axes), strict=True):
            parts = (whole.get(name) or self.split(name) for name in names if name is not None)
            total += math.prod(leaf.shape) // math.prod(parts)
        return (total - self._tables()) // self.config.n_layers

    def _mlp_width(self) -> int:
        config = self.config
        if not config.n_experts:
            return config.mlp_dim // self.split("mlp")
        # Each token meets its experts, wherever they are; balanced, every device has its share.
        return int(_ROOM * config.experts_per_token) * config.mlp_dim // self.split("expert_mlp")


def _weights(model: Model, mesh: Mesh | AbstractMesh):
    return jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        model.abstract,
        model.shardings(mesh),
    )


def _state(layout: Layout):
    trained, _ = split_frozen(layout.model.abstract)
    to, _ = split_frozen(layout.model.shardings(layout.mesh))
    shardings = state_shardings(trained, to, layout.optimizer, layout.mesh)
    return abstract_state(trained, shardings, layout.optimizer)

"""A mixture of experts in place of the MLP: every token goes to k of E of them, none is dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.dispatch import AXES, Weights, experts_on_mesh
from jaxrl.models.layers import ACTIVATIONS, Context, Declare

if TYPE_CHECKING:
    from jaxrl.config import ModelConfig

_FEW = 4  # on CPU, a grouped product costs about so many plain ones (measured: 5 to 8)


class Experts(nnx.Module):
    """Top-k routing: Jiang et al. 2024, "Mixtral of Experts", section 2.1; Qwen3-MoE is the same
    with more and smaller experts."""

    def __init__(self, config: ModelConfig, declare: Declare):
        e, d, f = config.n_experts, config.d_model, config.mlp_dim
        # Not split by expert: every device needs all scores to find the best.
        self.router = declare((e, d), AXES.router, std=d**-0.5)
        self.gate = declare((e, f, d), AXES.gate, std=d**-0.5)
        self.up = declare((e, f, d), AXES.up, std=d**-0.5)
        self.down = declare((e, d, f), AXES.down, std=(f * 2 * config.n_layers) ** -0.5)
        self.k, self.normalize = config.experts_per_token, config.normalize_experts
        self.activation = config.activation

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        weights = (self.router, self.gate, self.up, self.down)
        weights = Weights(*(w[...].astype(x.dtype) for w in weights))
        if not context.alone:
            return experts_on_mesh(
                x,
                weights,
                context.spread,
                route=self._route,
                k=self.k,
                activation=ACTIVATIONS[self.activation],
            )
        shares, chosen = self._route(x, weights.router)
        args = (x, shares.astype(x.dtype), chosen, weights)
        few = weights.gate.shape[0] <= _FEW * self.k
        on_cpu = self.every_expert if few else self.chosen_experts
        return jax.lax.platform_dependent(*args, cpu=on_cpu, default=self.chosen_experts)

    def _route(self, x: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [..., D], router [E, D] -> (shares float32, experts int32), both [..., k]."""
        scores = jnp.einsum("...d,ed->...e", x, router, preferred_element_type=jnp.float32)
        shares, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), self.k)
        if self.normalize:
            shares /= jnp.sum(shares, axis=-1, keepdims=True)
        return shares, chosen

    def every_expert(
        self, x: jax.Array, shares: jax.Array, chosen: jax.Array, weights: Weights
    ) -> jax.Array:
        """All experts on all tokens, weighted with 0 where they were not chosen.

        E/k times the work, but plain products, which CPUs are good at.
        """
        hits = chosen[..., None] == jnp.arange(weights.gate.shape[0])
        weight = jnp.sum(jnp.where(hits, shares[..., None], 0), axis=2)
        inner = ACTIVATIONS[self.activation](jnp.einsum("btd,efd->btef", x, weights.gate))
        inner = inner * jnp.einsum("btd,efd->btef", x, weights.up) * weight[..., None]
        return jnp.einsum("btef,edf->btd", inner, weights.down)

    def chosen_experts(
        self, x: jax.Array, shares: jax.Array, chosen: jax.Array, weights: Weights
    ) -> jax.Array:
        """Only the chosen experts: tokens sorted by expert, one product for each group."""
        rows = x.reshape(-1, x.shape[-1])
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        token = order // self.k
        sizes = jnp.bincount(flat, length=weights.gate.shape[0])

        def product(rows: jax.Array, weight: jax.Array) -> jax.Array:
            return jax.lax.ragged_dot(rows, weight.swapaxes(1, 2), sizes)

        inputs = rows[token]
        inner = ACTIVATIONS[self.activation](product(inputs, weights.gate))
        inner = inner * product(inputs, weights.up)
        outputs = product(inner, weights.down) * shares.reshape(-1)[order][:, None]
        return jnp.zeros_like(rows).at[token].add(outputs).reshape(x.shape)

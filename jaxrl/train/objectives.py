"""What is minimised: log-probabilities and a batch in, one loss and its metrics out.

The loss of a batch is the sum of its per-token losses times `loss_weights`, which sum to 1 over the
whole batch. So losses and gradients of micro-batches only have to be added up, however the tokens
are spread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.algorithms.losses import clipped_surrogate, decoupled_surrogate, kl_k3, nll
from jaxrl.algorithms.masks import keep
from jaxrl.models.model import Model, sequence_logprobs
from jaxrl.sharding import DEFAULT_RULES, Rules

if TYPE_CHECKING:
    from jaxrl.config import AlgorithmConfig

Batch = Mapping[str, jax.Array]
"""The fields of `TrajectoryBatch` by name, and what an objective needs besides; all [R, T]."""


class Metrics(NamedTuple):
    """Parts of the metrics that add up over micro-batches, and parts of which the largest counts.

    `sums` are sums over the tokens of the loss ("tokens": their number; "loss": weighted);
    `maxima` are never negative. All are scalars on the device.
    """

    sums: dict[str, jax.Array]
    maxima: dict[str, jax.Array]

    def __add__(self, other: Metrics) -> Metrics:  # type: ignore[override]
        sums = {name: self.sums[name] + other.sums[name] for name in self.sums}
        maxima = {name: jnp.maximum(self.maxima[name], other.maxima[name]) for name in self.maxima}
        return Metrics(sums, maxima)


class TokenTerms(NamedTuple):
    """Per token [R, T]: the loss; values whose mean is a metric; values whose maximum is one."""

    loss: jax.Array
    means: dict[str, jax.Array]
    maxima: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
    """(model, params, batch) -> (loss, metrics).

    `terms(logp, entropy, batch)` gives the values per token, 0 outside the loss mask.
    Log-probabilities are those of logits / `temperature`, the distribution that the sampler draws
    from; `logprob_chunk` is the number of tokens that are unembedded at a time. `needs` names
    arrays that the batch must hold besides the fields of `TrajectoryBatch`.
    """

    terms: Callable[[jax.Array, jax.Array, Batch], TokenTerms]
    temperature: float = 1.0
    logprob_chunk: int = 256
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature} must be positive: "
                "a greedy sampler has no log-probabilities"
            )

    def __call__(
        self,
        model: Model,
        params: Any,
        batch: Batch,
        *,
        mesh: Mesh | None = None,
        rules: Rules = DEFAULT_RULES,
    ) -> tuple[jax.Array, Metrics]:
        """Weighted sum of the losses of `batch`, and the parts of the metrics."""
        logp, entropy = self.logprobs(model, params, batch, mesh=mesh, rules=rules)
        terms = self.terms(logp, entropy, batch)
        loss = jnp.sum(terms.loss * batch["loss_weights"])
        sums = {name: jnp.sum(value) for name, value in terms.means.items()}
        sums["tokens"] = jnp.sum(batch["loss_mask"], dtype=jnp.int32)
        sums["loss"] = jax.lax.stop_gradient(loss)
        maxima = {name: jnp.max(value) for name, value in terms.maxima.items()}
        return loss, Metrics(sums, maxima)

    def logprobs(
        self,
        model: Model,
        params: Any,
        batch: Batch,
        *,
        mesh: Mesh | None = None,
        rules: Rules = DEFAULT_RULES,
    ) -> tuple[jax.Array, jax.Array]:
        """(log-probability, entropy) of every token given those before it, float32 [R, T]."""
        return sequence_logprobs(
            model,
            params,
            batch["tokens"],
            batch["positions"],
            batch["segment_ids"],
            temperature=self.temperature,
            chunk=self.logprob_chunk,
            mesh=mesh,
            rules=rules,
        )


def grpo_objective(
    config: AlgorithmConfig, *, temperature: float = 1.0, logprob_chunk: int = 256
) -> Objective:
    """Clipped policy gradient on the advantages of the batch, as `config` says.

    With `config.decoupled`, the proximal policy is the one that the gradient is taken of (exact
    with one update per batch), unless the batch brings its own "prox_logp". With `config.kl_coef`,
    the batch must bring "ref_logp", and kl_coef times the k3 estimate of the KL to the reference is
    added.
    """

    def terms(logp: jax.Array, entropy: jax.Array, batch: Batch) -> TokenTerms:
        mask, behavior = batch["loss_mask"], batch["behavior_logp"]
        policy = _policy_loss(config, logp, batch)
        loss, means = policy.loss, dict(policy.metrics)
        if config.kl_coef:
            kl = kl_k3(logp, batch["ref_logp"], mask)
            loss, means["kl"] = loss + config.kl_coef * kl, jax.lax.stop_gradient(kl)
        fixed = jax.lax.stop_gradient(logp)
        gap = jnp.abs(keep(mask, fixed) - keep(mask, behavior))
        ratios = {n: means[n] for n in ("ratio", "behavior_weight") if n in means}
        means |= {
            "entropy": keep(mask, entropy),
            "logp": keep(mask, fixed),
            "logp_gap": gap,
            "behavior_kl": kl_k3(fixed, behavior, mask),
        }
        maxima = {f"{name}_max": value for name, value in ratios.items()} | {"logp_gap_max": gap}
        return TokenTerms(loss, means, maxima)

    needs = ("ref_logp",) if config.kl_coef else ()
    return Objective(terms, temperature, logprob_chunk, needs)


def sft_objective(*, logprob_chunk: int = 256) -> Objective:
    """Negative log-likelihood of the tokens in the loss mask."""

    def terms(logp: jax.Array, entropy: jax.Array, batch: Batch) -> TokenTerms:
        mask = batch["loss_mask"]
        loss = nll(logp, mask)
        means = {"nll": jax.lax.stop_gradient(loss), "entropy": keep(mask, entropy)}
        return TokenTerms(loss, means, {})

    return Objective(terms, 1.0, logprob_chunk)


def _policy_loss(config: AlgorithmConfig, logp: jax.Array, batch: Batch) -> Any:
    """The surrogate that `config` chooses, around the right policy."""
    arrays = (batch["behavior_logp"], batch["advantages"], batch["loss_mask"])
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    if not config.decoupled:
        return clipped_surrogate(logp, *arrays, **clip)
    prox_logp = batch.get("prox_logp", jax.lax.stop_gradient(logp))
    return decoupled_surrogate(
        logp, prox_logp, *arrays, **clip, weight_cap=config.behavior_weight_cap
    )

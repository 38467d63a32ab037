"""`TrainEngine`: holds the train state on a mesh and applies updates to it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jaxrl.distributed import current
from jaxrl.models.lora import join_frozen, split_frozen
from jaxrl.models.model import Model
from jaxrl.sharding import DEFAULT_RULES, Rules, make_mesh
from jaxrl.train.objectives import Objective
from jaxrl.train.optimizer import Optimizer
from jaxrl.train.state import TrainState
from jaxrl.train.step import ROWS, jit_step
from jaxrl.types import TrajectoryBatch
from jaxrl.weights.disk import check_tensors, tensors_of
from jaxrl.weights.exchange import copy_to


class TrainEngine:
    """Weights and optimizer state on `mesh` (None: the first device), changed by `update` only.

    Of a model with adapters only these are trained. What is trained of `params` is copied at the
    door, so the caller's stay valid. `version` is the number of the weights that come in, `name`
    what the step is called where several processes compare it. Raises `ValueError` if the mesh
    cannot split the model, and `CheckpointError` if `params` are not those of `model`.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        optimizer: Optimizer | optax.GradientTransformation,
        objective: Objective,
        *,
        mesh: Mesh | None = None,
        micro_batches: int = 1,
        rules: Rules = DEFAULT_RULES,
        version: int = 0,
        name: str = "train step",
    ):
        if micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches} must be at least 1")
        check_tensors(tensors_of(params), tensors_of(model.abstract), "params")
        self.model, self.objective, self.rules = model, objective, rules
        self.mesh = make_mesh(devices=jax.local_devices()[:1]) if mesh is None else mesh
        self.micro_batches = micro_batches
        self._version = version
        _, frozen_to = split_frozen(model.shardings(self.mesh, rules))
        trained, frozen = split_frozen(params)
        self._update, self._shardings = jit_step(
            model, optimizer, objective, mesh=self.mesh, rules=rules
        )
        # With several processes: all must have compiled the same program before it first runs.
        self._name, self._update = name, current().checked(self._update, name=name)
        self._state = self._initial_state(trained, optimizer)
        self._frozen = jax.device_put(frozen, frozen_to)

    @property
    def version(self) -> int:
        """Number of the weights that `params` holds: the one at the start plus updates since."""
        return self._version

    @property
    def state(self) -> TrainState:
        """The state; its arrays are gone after the next `update`."""
        return self._state

    @property
    def params(self) -> Any:
        """All weights. The next `update` donates those it trains; `weights.exchange` makes
        copies."""
        return join_frozen(self._state.params, self._frozen)

    @property
    def frozen(self) -> Any:
        """The weights that are not trained: all but the adapters, or none."""
        return self._frozen

    @property
    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct` with shardings: what a checkpoint restores to."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._state
        )

    @property
    def compile_count(self) -> int:
        """How many programs `update` has been compiled to; 1 as long as shapes stay the same."""
        return self._update._cache_size()

    def update(
        self, batch: TrajectoryBatch, extras: Mapping[str, Any] | None = None
    ) -> dict[str, jax.Array]:
        """One optimizer update; `version` grows by 1. Returns device scalars, without waiting.

        `extras` are further arrays [R, T] that the objective uses ("ref_logp", "prox_logp").

        Metrics: loss, tokens (in the loss), grad_norm (before clipping), learning_rate, nonfinite,
        entropy (nats), and those of the objective. When "nonfinite" is 1 the loss or the gradient
        was not finite and the state is as before; `version` counts the update all the same, so that
        the caller, who learns of it a step later, can name the update and stop.

        Raises `ValueError` for rows that cannot be divided, and for missing extras.
        """
        extras = dict(extras or {})
        missing = [name for name in self.objective.needs if name not in extras]
        if missing:
            raise ValueError(f"the objective needs {', '.join(missing)} in extras")
        arrays = self._place({**batch.arrays(), **extras})
        current().enter(self._name, step=self._version)
        self._state, metrics = self._update(self._state, self._frozen, arrays)
        self._version += 1
        return metrics

    def logprobs(self, batch: TrajectoryBatch, params: Any = None) -> jax.Array:
        """Log-probability of every token given those before it, float32 [R, T], on the device.

        Under `params` (None: the present weights), with the objective's temperature. 0 for the
        first token of each sequence and in padding.
        """
        arrays = batch.arrays()
        inputs = {name: arrays[name] for name in ("tokens", "positions", "segment_ids")}
        current().enter("log-probabilities", step=self._version)
        return self._logprobs(self.params if params is None else params, self._place(inputs))

    def restore(self, state: TrainState, *, version: int) -> None:
        """Go on from `state` (as from a checkpoint), whose weights have the number `version`.

        The engine takes the state over: the caller must not use it any more.
        """
        check_tensors(tensors_of(state), tensors_of(self._state), "the restored state")
        self._state = jax.device_put(state, self._shardings)
        self._version = version

    @functools.cached_property
    def _logprobs(self) -> Any:
        def one(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
            return self.objective.logprobs(
                self.model, params, batch, mesh=self.mesh, rules=self.rules
            )[0]

        def run(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
            logp = jax.lax.map(functools.partial(one, params), batch)
            return logp.reshape(-1, logp.shape[-1])

        return current().checked(jax.jit(run), name="log-probabilities")

    def _initial_state(self, params: Any, optimizer: Any) -> TrainState:
        params = copy_to(params, self._shardings.params)
        rest = jax.jit(
            lambda params: (optimizer.init(params), jnp.zeros((), jnp.int32)),
            out_shardings=(self._shardings.opt_state, self._shardings.step),
        )
        return TrainState(params, *rest(params))

    def _place(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Arrays [R, T] -> [M, R/M, T] on the mesh, rows split over the data axes."""
        rows, length = arrays["tokens"].shape
        sharding = self.rules.sharding(self.mesh, ROWS)
        data, context = (self.rules.shards(self.mesh, axis) for axis in ROWS[1:])
        if rows % (self.micro_batches * data):
            raise ValueError(
                f"rows={rows} must be divisible by {self.micro_batches * data}: "
                f"micro_batches={self.micro_batches} x {data} devices along the batch"
            )
        if length % context:
            raise ValueError(
                f"row length {length} must be divisible by the context axis, {context}"
            )
        micro = {}
        for name, array in arrays.items():
            if array.shape != (rows, length):
                raise ValueError(f"{name} has shape {array.shape}, but tokens {(rows, length)}")
            if not isinstance(array, jax.Array):
                # A copy, because device_put may keep a view of the caller's memory on CPU.
                array = np.array(array)
            micro[name] = array.reshape(self.micro_batches, -1, length)
        return {name: _onto(array, sharding) for name, array in micro.items()}


def _onto(array: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array under `sharding`; of a host's array each process takes what its devices hold."""
    if isinstance(array, jax.Array) or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

"""The decode engine: compiled prefill, insert and generate over a fixed number of slots.

The engine holds no weights and no state: both are passed at each call, so that weights can change
between two calls and the state can be donated. `warm_up` compiles every shape it will ever run.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrl.inference import steps
from jaxrl.inference.sampling import seed_words
from jaxrl.inference.steps import Control, Copies, DecodeState, First, Params, Prefix, Starts
from jaxrl.models.model import Model, init_cache
from jaxrl.sharding import DEFAULT_RULES, Rules
from jaxrl.types import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One slot to fill: row `row` of a prefix goes into `slot` and is sampled with `params`."""

    slot: int
    row: int
    params: SamplingParams


class Engine:
    """Pure verbs over `slots` rows of at most `max_length` tokens each (prompt and completion).

    `prefill_buckets` are the padded prompt lengths (default: powers of two from 16), and
    `attend_buckets` the cache lengths that decoding attends to (from 64); `max_length` is always
    the last. Up to `prefill_rows` prompts share one prefill call. `steps_per_dispatch` is the
    largest number of tokens per slot in one call of `generate`. With a `mesh`, slots are split over
    the batch axes of `rules` and heads over its tensor axis; without one, everything lives on
    `device` (default: the first).

    Raises ValueError for sizes that do not fit together.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int,
        max_length: int,
        prefill_buckets: Sequence[int] = (),
        attend_buckets: Sequence[int] = (),
        steps_per_dispatch: int = 8,
        prefill_rows: int = 4,
        max_stop_tokens: int = 8,
        mesh: Mesh | None = None,
        device: jax.Device | None = None,
        rules: Rules = DEFAULT_RULES,
    ) -> None:
        sizes = {
            "slots": slots,
            "steps_per_dispatch": steps_per_dispatch,
            "prefill_rows": prefill_rows,
            "max_stop_tokens": max_stop_tokens,
        }
        _check_sizes(sizes, max_length, rules.shards(mesh, "batch"))
        self.model = model
        self.slots = slots
        self.max_length = max_length
        self.steps_per_dispatch = steps_per_dispatch
        self.max_stop_tokens = max_stop_tokens
        self.prefill_buckets = _buckets("prefill_buckets", prefill_buckets, 16, max_length)
        # One program whatever the number of prompts: another shape may round differently, and then
        # a request's numbers would depend on who arrived with it.
        self.prefill_rows = (min(prefill_rows, slots),)
        self.attend_buckets = _buckets("attend_buckets", attend_buckets, 64, max_length)
        self._compiled: dict[tuple, Callable] = {}
        self._mesh, self._rules = mesh, rules
        if mesh is None:
            self._whole = SingleDeviceSharding(jax.devices()[0] if device is None else device)
            self.param_shardings = jax.tree.map(lambda _: self._whole, model.abstract)
        else:
            self._whole = NamedSharding(mesh, PartitionSpec())
            self.param_shardings = model.shardings(mesh, rules)
        self._params_like = _described(model.abstract, self.param_shardings)
        self._state_like = self._describe_state()

    @property
    def compile_count(self) -> int:
        """Number of programs compiled so far; constant after `warm_up`."""
        return len(self._compiled)

    def warm_up(
        self, params: Params | None = None, *, prefill_buckets: Sequence[int] | None = None
    ) -> None:
        """Compiles every program; checks `params` if given. Nothing compiles later.

        With `prefill_buckets`, prompts of other buckets wait for their programs when they come.
        """
        if params is not None:
            self.check_params(params)
        buckets = self.prefill_buckets if prefill_buckets is None else prefill_buckets
        prefills = [(r, b) for b in buckets for r in self.prefill_rows]
        keys = [("generate", attend) for attend in self.attend_buckets]
        keys += [(verb, *sizes) for sizes in prefills for verb in ("prefill", "copy")]
        keys += [("init",), ("start",)]
        # Compilers run outside Python's lock.
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda key: self._program(*key), keys))

    def check_params(self, params: Params) -> None:
        """Raises ValueError, naming the weight, unless shape, dtype and place are the engine's."""
        want, want_tree = jax.tree_util.tree_flatten_with_path(self._params_like)
        have, have_tree = jax.tree_util.tree_flatten_with_path(params)
        if want_tree != have_tree:
            raise ValueError(f"weights have the tree {have_tree}, the model needs {want_tree}")
        for (path, like), (_, leaf) in zip(want, have, strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if leaf.shape != like.shape or leaf.dtype != like.dtype:
                raise ValueError(
                    f"weight {name} is {leaf.dtype}{list(leaf.shape)}, "
                    f"the model needs {like.dtype}{list(like.shape)}"
                )
            if not leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim):
                raise ValueError(
                    f"weight {name} lies on {leaf.sharding}, the engine needs {like.sharding}: "
                    f"copy the weights to engine.param_shardings first"
                )

    def init_state(self) -> DecodeState:
        """A state with every slot empty."""
        return self._program("init")()

    def prefill(self, params: Params, prompts: Sequence[np.ndarray], version: int) -> Prefix:
        """Prompts int [P] of equal bucket, at most `prefill_rows[-1]` -> one row each.

        `version` is the number of the weights; tokens drawn from the result are stamped with it.
        """
        bucket = self.prefill_bucket(max(len(p) for p in prompts))
        rows = next(r for r in self.prefill_rows if r >= len(prompts))
        tokens = np.zeros((rows, bucket), np.int32)
        length = np.ones(rows, np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = prompt
            length[i] = len(prompt)
        return self._program("prefill", rows, bucket)(params, tokens, length, np.int32(version))

    def insert(
        self, prefix: Prefix, state: DecodeState, entries: Sequence[Entry], *, resume: bool = False
    ) -> DecodeState:
        """Fills one or several slots from rows of `prefix`; `state` is donated.

        The slots are emptied first, whatever was in them. With `resume` only their caches are
        renewed: tokens, limits and the token already drawn stay (recomputation under new weights).
        """
        cache = jax.tree.leaves(prefix.cache)[0]
        rows, bucket = cache.shape[-4], cache.shape[-2]
        copies, starts = self._copies(entries), self._starts(entries)
        cache = self._program("copy", rows, bucket)(prefix.cache, state.cache, copies)
        slots = state.slots
        if not resume:
            slots = self._program("start")(prefix.first, slots, starts)
        return DecodeState(cache, slots)

    def generate(
        self,
        params: Params,
        state: DecodeState,
        *,
        version: int,
        mask: np.ndarray,
        longest: int,
        max_steps: int | None = None,
        leave_at: int | None = None,
    ) -> tuple[DecodeState, jax.Array]:
        """Decodes the slots of `mask` bool [S] -> state, int32 [S, steps_per_dispatch, 4].

        The last axis is token, valid, version, bits of the log-probability; slots outside the mask,
        empty or finished are frozen, with valid 0. `longest` is the largest number of tokens that a
        sequence may hold at the end of the dispatch. Returns after `max_steps` steps, or as soon as
        `leave_at` slots have finished. `state` is donated; the call does not wait for the device.
        """
        attend = next(a for a in self.attend_buckets if a >= min(longest, self.max_length))
        control = Control(
            mask=mask,
            version=np.int32(version),
            steps=np.int32(self.steps_per_dispatch if max_steps is None else max_steps),
            leave_at=np.int32(self.slots + 1 if leave_at is None else leave_at),
        )
        return self._program("generate", attend)(params, state, control)

    def prefill_bucket(self, length: int) -> int:
        """The smallest bucket that holds a prompt of `length` tokens."""
        return next(b for b in self.prefill_buckets if b >= length)

    def _copies(self, entries: Sequence[Entry]) -> Copies:
        slot, row = np.zeros(self.slots, np.int32), np.zeros(self.slots, np.int32)
        for i, entry in enumerate(entries):
            slot[i], row[i] = entry.slot, entry.row
        return Copies(slot, row, np.int32(len(entries)))

    def _starts(self, entries: Sequence[Entry]) -> Starts:
        size = self.slots
        starts = Starts(
            slot=np.full(size, size, np.int32),
            row=np.zeros(size, np.int32),
            remaining=np.zeros(size, np.int32),
            temperature=np.zeros(size, np.float32),
            seed=np.zeros((size, 2), np.uint32),
            stops=np.full((size, self.max_stop_tokens), -1, np.int32),
        )
        for i, entry in enumerate(entries):
            params = entry.params
            starts.slot[i], starts.row[i] = entry.slot, entry.row
            starts.remaining[i], starts.temperature[i] = params.max_tokens, params.temperature
            starts.seed[i] = seed_words(params.seed)
            starts.stops[i, : len(params.stop_tokens)] = params.stop_tokens
        return starts

    def _program(self, verb: str, *sizes: int) -> Callable:
        """The compiled program of a verb for these sizes; compiles it if `warm_up` has not run."""
        key = (verb, *sizes)
        if key not in self._compiled:
            build = getattr(self, f"_build_{verb}")
            self._compiled[key] = build(*sizes).compile()
        return self._compiled[key]

    # Ahead-of-time compilation: a program that gets other shapes or placements than those it was
    # compiled for refuses them, where jit would silently compile again.

    def _build_init(self) -> jax.stages.Lowered:
        return jax.jit(self._empty_state, out_shardings=_shardings(self._state_like)).lower()

    def _build_prefill(self, rows: int, bucket: int) -> jax.stages.Lowered:
        function = functools.partial(
            steps.prefill,
            self.model,
            out_rows=self.prefill_rows[-1],
            mesh=self._mesh,
            rules=self._rules,
        )
        out = _shardings(self._prefix_like(rows, bucket))
        ints = [self._host((rows, bucket)), self._host((rows,)), self._host(())]
        return jax.jit(function, out_shardings=out).lower(self._params_like, *ints)

    def _build_copy(self, rows: int, bucket: int) -> jax.stages.Lowered:
        target = self._state_like.cache
        copy = jax.jit(steps.copy_rows, donate_argnums=1, out_shardings=_shardings(target))
        copies = self._from_host(self._copies(()))
        return copy.lower(self._prefix_like(rows, bucket).cache, target, copies)

    def _build_start(self) -> jax.stages.Lowered:
        slots = self._state_like.slots
        start = jax.jit(steps.start_slots, donate_argnums=1, out_shardings=_shardings(slots))
        first = self._prefix_like(1, self.prefill_buckets[0]).first
        return start.lower(first, slots, self._from_host(self._starts(())))

    def _build_generate(self, attend: int) -> jax.stages.Lowered:
        model, k = self.model, self.steps_per_dispatch

        def generate(params: Params, state: DecodeState, control: Control) -> tuple:
            logits = steps.next_logits(model, params, self._mesh, self._rules)
            return steps.generate(logits, state, control, steps=k, attend_length=attend)

        ints = [self._host(()) for _ in range(3)]
        control = Control(self._host((self.slots,), bool), *ints)
        out = (_shardings(self._state_like), self._whole)
        program = jax.jit(generate, donate_argnums=1, out_shardings=out)
        return program.lower(self._params_like, self._state_like, control)

    def _empty_state(self) -> DecodeState:
        cache = init_cache(self.model, self.slots, self.max_length)
        return DecodeState(cache, steps.empty_slots(self.slots, self.max_stop_tokens))

    def _describe_state(self) -> DecodeState:
        """Shapes and placement of the state: slots over the batch axes, heads over tensor."""
        return self._described(jax.eval_shape(self._empty_state), "batch")

    def _prefix_like(self, rows: int, bucket: int) -> Prefix:
        """Shapes and placement of a prefix: every group of devices holds all rows."""
        vocab = self.model.config.vocab_size
        first = First(
            logits=jax.ShapeDtypeStruct((self.prefill_rows[-1], vocab), jnp.float32),
            length=jax.ShapeDtypeStruct((self.prefill_rows[-1],), jnp.int32),
            version=jax.ShapeDtypeStruct((), jnp.int32),
        )
        cache = jax.eval_shape(functools.partial(init_cache, self.model, rows, bucket))
        shapes = Prefix(cache, first)
        return self._described(shapes, None)

    def _described(self, tree: Any, batch: str | None) -> Any:
        """Adds shardings to a state or prefix. Cache leaves are those of 4 or more dimensions."""

        def sharding(leaf: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
            if self._mesh is None or leaf.ndim == 0:
                return self._whole
            if leaf.ndim >= 4:
                layers = (None,) * (leaf.ndim - 4)
                return self._rules.sharding(self._mesh, (*layers, batch, "kv_heads", None, None))
            return self._rules.sharding(self._mesh, (batch, *(None,) * (leaf.ndim - 1)))

        return _described(tree, jax.tree.map(sharding, tree))

    def _from_host(self, arrays: Any) -> Any:
        """Arguments like these numpy arrays."""
        return jax.tree.map(lambda x: self._host(x.shape, x.dtype), arrays)

    def _host(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """An argument that comes from the host."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)


def _described(tree: Any, shardings: Any) -> Any:
    """Shapes and dtypes of `tree` with `shardings`."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def _check_sizes(sizes: dict[str, int], max_length: int, shards: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if max_length < 2:
        raise ValueError(f"max_length={max_length} must hold a prompt and a token: at least 2")
    if sizes["slots"] % shards:
        raise ValueError(
            f"slots={sizes['slots']} must be divisible by the mesh's batch axes, {shards}"
        )


def _buckets(name: str, asked: Sequence[int], smallest: int, max_length: int) -> tuple[int, ...]:
    """Ascending lengths, by default powers of two from `smallest`; `max_length` is the last."""
    for size in asked:
        if not 1 <= size <= max_length:
            raise ValueError(f"{name}: {size} must lie between 1 and max_length={max_length}")
    powers = [1 << i for i in range(max_length.bit_length()) if 1 << i >= smallest]
    return tuple(sorted({*(asked or powers), max_length}))

"""The decode engine: compiled prefill, insert and generate over a fixed number of slots.

The engine holds no weights and no state: both are passed at each call, so that weights can change
between two calls and the state can be donated. `warm_up` compiles every shape it will ever run.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrl.inference import steps
from jaxrl.inference.arguments import (
    Entry,
    Piece,
    make_copies,
    make_pieces,
    make_spread,
    make_starts,
)
from jaxrl.inference.sizes import check_sizes, choose_chunk, make_buckets
from jaxrl.inference.state import (
    Control,
    DecodeState,
    First,
    Prefix,
    Slots,
    Starts,
    empty_slots,
)
from jaxrl.inference.steps import Params
from jaxrl.models.model import Model, init_cache
from jaxrl.sharding import DEFAULT_RULES, Rules


class Engine:
    """Pure verbs over `slots` rows of at most `max_length` tokens each (prompt and completion).

    Prompts are computed in pieces of `prefill_chunk` tokens (default: 256, or the largest of
    `prefill_buckets`, evenly split) and a rest, padded to the next of `prefill_buckets` (default:
    powers of two from 16; the chunk is always the last). Several pieces of one bucket share a call:
    at most `prefill_rows`, and about `prefill_tokens` tokens with their padding.
    `attend_buckets` are the cache lengths that decoding attends to (from 64; `max_length` is always
    the last). `steps_per_dispatch` is the largest number of tokens per slot in one call of
    `generate`, `top_logprobs` the most alternatives that a request may ask for. With a `mesh`,
    slots are split over the batch axes of `rules` and heads over its tensor axis; without one,
    everything lives on `device` (default: the first).

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
        prefill_chunk: int | None = None,
        prefill_tokens: int = 512,
        max_stop_tokens: int = 8,
        top_logprobs: int = 0,
        mesh: Mesh | None = None,
        device: jax.Device | None = None,
        rules: Rules = DEFAULT_RULES,
    ) -> None:
        sizes = {
            "slots": slots,
            "steps_per_dispatch": steps_per_dispatch,
            "prefill_rows": prefill_rows,
            "prefill_tokens": prefill_tokens,
            "max_stop_tokens": max_stop_tokens,
        }
        check_sizes(sizes, max_length, rules.shards(mesh, "slots"))
        if not 0 <= top_logprobs <= model.config.vocab_size:
            raise ValueError(
                f"top_logprobs={top_logprobs} must lie between 0 and the vocabulary's "
                f"{model.config.vocab_size}"
            )
        self.model = model
        self.slots = slots
        self.max_length = max_length
        self.steps_per_dispatch = steps_per_dispatch
        self.max_stop_tokens = max_stop_tokens
        self.top_logprobs = top_logprobs
        self.prefill_chunk = choose_chunk(prefill_chunk, prefill_buckets, max_length)
        self.prefill_buckets = make_buckets(
            "prefill_buckets", prefill_buckets, 16, self.prefill_chunk, max_length
        )
        # One program for each bucket, whatever the number of prompts: another shape may round
        # differently, and then a request's numbers would depend on who arrived with it.
        most = min(prefill_rows, slots)
        self._rows = {b: max(1, min(most, prefill_tokens // b)) for b in self.prefill_buckets}
        self.attend_buckets = make_buckets(
            "attend_buckets", attend_buckets, 64, max_length, max_length
        )
        # Whole pieces are written, the last one with its padding.
        self.cache_length = -(-max_length // self.prefill_chunk) * self.prefill_chunk
        self._compiled: dict[tuple, Callable] = {}
        self._scratch: DecodeState | None = None
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
    def cache_bytes(self) -> int:
        """Bytes of all slots' keys and values, on all devices together."""
        leaves = jax.tree.leaves(self._state_like.cache)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def abstract_state(self) -> DecodeState:
        """The decode state as `jax.ShapeDtypeStruct` with shardings."""
        return self._state_like

    @property
    def prefill_rows(self) -> tuple[int, ...]:
        """Rows of one prefill call, for each of `prefill_buckets`."""
        return tuple(self._rows.values())

    def rows_of(self, bucket: int) -> int:
        """How many pieces of a bucket share one prefill call."""
        return self._rows[bucket]

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
        keys = [("generate", attend) for attend in self.attend_buckets]
        keys += [(verb, bucket) for bucket in buckets for verb in ("prefill", "copy")]
        keys += [("init",), ("start",), ("peek",)]
        if self.cache_length > self.prefill_chunk:
            keys += [("spread",)]
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

    def prefill(
        self,
        params: Params,
        pieces: Sequence[Piece] | Sequence[np.ndarray],
        version: int,
        state: DecodeState | None = None,
    ) -> Prefix:
        """Pieces of equal bucket, at most `rows_of(bucket)` -> one row each.

        What stands before a piece is read from `state`, which stays as it is. `version` is the
        number of the weights; tokens drawn from the result are stamped with it. Whole prompts
        int [P] of one piece each may be passed without a state; that form will go.
        """
        if state is None:
            state, pieces = self._whole_prompts(pieces)
        bucket = self.prefill_bucket(max(len(piece.tokens) for piece in pieces))
        arrays = make_pieces(self.rows_of(bucket), bucket, version, pieces)
        return self._program("prefill", bucket)(params, state.cache, arrays)

    def _whole_prompts(self, prompts: Sequence[np.ndarray]) -> tuple[DecodeState, list[Piece]]:
        warnings.warn(
            "Engine.prefill without a state is deprecated: pass Pieces and the decode state",
            FutureWarning,
            stacklevel=3,
        )
        if self._scratch is None:
            self._scratch = self.init_state()
        return self._scratch, [Piece(np.asarray(prompt)) for prompt in prompts]

    def insert(
        self, prefix: Prefix, state: DecodeState, entries: Sequence[Entry], *, resume: bool = False
    ) -> DecodeState:
        """Fills one or several slots from rows of `prefix`; `state` is donated.

        The slots are emptied first, whatever was in them. With `resume` only their caches are
        written: tokens, limits and the token already drawn stay (for a piece that is not the last,
        and for recomputation under new weights).
        """
        bucket = jax.tree.leaves(prefix.cache)[0].shape[-2]
        cache = self._program("copy", bucket)(
            prefix.cache, state.cache, make_copies(self.slots, entries)
        )
        slots = state.slots
        if not resume:
            slots = self._program("start")(prefix.first, slots, self._starts(entries))
        return DecodeState(cache, slots)

    def spread(
        self, state: DecodeState, source: int, targets: Sequence[int], length: int
    ) -> DecodeState:
        """Copies the first `length` cache entries (whole chunks) of one slot into others; `state`
        is donated."""
        blocks = -(-length // self.prefill_chunk)
        spread = make_spread(self.slots, source, targets, blocks)
        return DecodeState(self._program("spread")(state.cache, spread), state.slots)

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
        """Decodes the slots of `mask` bool [S] -> state, int32 [S, steps_per_dispatch, F].

        The last axis is token, valid, version, bits of the log-probability, and with `top_logprobs`
        = N > 0 the N most likely tokens and the bits of theirs; slots outside the mask,
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

    def peek(self, state: DecodeState) -> jax.Array:
        """What every slot gives out next -> int32 [S, F], as one step of `generate` will tell it.

        `state` stays as it is.
        """
        return self._program("peek")(state.slots)

    def prefill_bucket(self, length: int) -> int:
        """The smallest bucket that holds a piece of `length` tokens."""
        return next(b for b in self.prefill_buckets if b >= length)

    def _starts(self, entries: Sequence[Entry]) -> Starts:
        return make_starts(self.slots, self.max_stop_tokens, entries)

    def _program(self, verb: str, *sizes: int) -> Callable:
        """The compiled program of a verb for these sizes; compiles it if `warm_up` has not run."""
        key = (verb, *sizes)
        if key not in self._compiled:
            self._compiled[key] = self.lower(verb, *sizes).compile()
        return self._compiled[key]

    def lower(self, verb: str, *sizes: int) -> jax.stages.Lowered:
        """The program of a verb before its compilation: "prefill" and "copy" of a bucket,
        "generate" of a length that is attended to, "init", "start", "spread" and "peek"."""
        return getattr(self, f"_build_{verb}")(*sizes)

    # Ahead-of-time compilation: a program that gets other shapes or placements than those it was
    # compiled for refuses them, where jit would silently compile again.

    def _build_init(self) -> jax.stages.Lowered:
        return jax.jit(self._empty_state, out_shardings=_shardings(self._state_like)).lower()

    def _build_prefill(self, bucket: int) -> jax.stages.Lowered:
        function = functools.partial(
            steps.prefill,
            self.model,
            block=self.prefill_chunk,
            out_rows=max(self.prefill_rows),
            mesh=self._mesh,
            rules=self._rules,
        )
        pieces = self._from_host(make_pieces(self.rows_of(bucket), bucket, 0, ()))
        program = jax.jit(function, out_shardings=_shardings(self._prefix_like(bucket)))
        return program.lower(self._params_like, self._state_like.cache, pieces)

    def _build_copy(self, bucket: int) -> jax.stages.Lowered:
        target = self._state_like.cache
        copy = jax.jit(steps.copy_rows, donate_argnums=1, out_shardings=_shardings(target))
        copies = self._from_host(make_copies(self.slots, ()))
        return copy.lower(self._prefix_like(bucket).cache, target, copies)

    def _build_spread(self) -> jax.stages.Lowered:
        function = functools.partial(
            steps.spread_row,
            block=self.prefill_chunk,
            split=self._rules.shards(self._mesh, "slots") > 1,
        )
        cache = self._state_like.cache
        program = jax.jit(function, donate_argnums=0, out_shardings=_shardings(cache))
        return program.lower(cache, self._from_host(make_spread(self.slots, 0, (), 0)))

    def _build_start(self) -> jax.stages.Lowered:
        slots = self._state_like.slots
        start = jax.jit(steps.start_slots, donate_argnums=1, out_shardings=_shardings(slots))
        first = self._prefix_like(self.prefill_buckets[0]).first
        return start.lower(first, slots, self._from_host(self._starts(())))

    def _build_peek(self) -> jax.stages.Lowered:
        def peek(slots: Slots) -> jax.Array:
            return steps.next_rows(slots, slots.remaining > 0)

        return jax.jit(peek, out_shardings=self._whole).lower(self._state_like.slots)

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
        cache = init_cache(self.model, self.slots, self.cache_length)
        slots = empty_slots(self.slots, self.max_stop_tokens, self.top_logprobs)
        return DecodeState(cache, slots)

    def _describe_state(self) -> DecodeState:
        """Shapes and placement of the state: slots over all axes but tensor, heads over that."""
        return self._described(jax.eval_shape(self._empty_state), "slots")

    def _prefix_like(self, bucket: int) -> Prefix:
        """Shapes and placement of a prefix: every group of devices holds all rows."""
        vocab, most, rows = self.model.config.vocab_size, max(self.prefill_rows), self._rows[bucket]
        first = First(
            logits=jax.ShapeDtypeStruct((most, vocab), jnp.float32),
            length=jax.ShapeDtypeStruct((most,), jnp.int32),
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

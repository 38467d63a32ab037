"""What the verbs of both of JetStream's APIs have in common. Nothing here imports JetStream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.data.tokenizers import Tokenizer
from jaxrl.inference.engine import Engine
from jaxrl.inference.jetstream_core import DecodeHalf, PrefillHalf
from jaxrl.inference.jetstream_prefix import Computed, Prefix, State
from jaxrl.inference.jetstream_programs import Place, row_like
from jaxrl.inference.jetstream_results import Streams
from jaxrl.inference.jetstream_text import NO_BOS, JetStreamTokenizer
from jaxrl.inference.sampling import Drawn, seed_words
from jaxrl.inference.steps import Params
from jaxrl.types import WeightVersion
from jaxrl.weights.digest import verify as verify_digest
from jaxrl.weights.exchange import check_newer

Role = Literal["both", "prefill", "generate"]
ROLES: tuple[Role, ...] = ("both", "prefill", "generate")

_streams = Streams()


class Weights:
    """What `load_params` gives and the verbs take: a holder of the present weights.

    JetStream's drivers load weights once and keep them; what is put in here reaches them all the
    same.
    """

    def __init__(self, params: Params, version: WeightVersion) -> None:
        # One attribute, so that another thread reads weights and version that belong together.
        self.current = (params, version)

    @property
    def version(self) -> WeightVersion:
        """Of the present weights."""
        return self.current[1]


class Verbs:
    """An engine without the names that differ between the APIs.

    `make_result` makes a `ResultTokens`. `seed` is the common seed of all requests.
    """

    ahead = False
    """Whether a first token is told before `generate` is called."""

    def __init__(
        self,
        weights: Weights,
        tokenizer: Tokenizer,
        prefills: PrefillHalf,
        decodes: DecodeHalf,
        make_result: Callable[[jax.Array, jax.Array, int], Any],
        *,
        place: Place,
        seed: int,
        max_prefill_length: int,
        role: Role,
        chunked_prefill: bool,
    ) -> None:
        self.weights = weights
        self._tokenizer = tokenizer
        self._prefills, self._decodes = prefills, decodes
        self._make_result = make_result
        self._place = place
        self._seed = seed
        self._longest_prompt = max_prefill_length
        self._role = role
        self._chunked = chunked_prefill
        self._slots = slots = decodes.engine.slots
        # Prefill, generate and free_resource come from different threads.
        self._lock = threading.Lock()
        self._requests = 0
        self._filled, self._freed = np.zeros(slots, int), np.zeros(slots, int)

    @property
    def engine(self) -> Engine:
        """The engine that decodes."""
        return self._decodes.engine

    @property
    def compile_count(self) -> int:
        """Number of programs compiled so far; constant after `load_params`."""
        halves = (self._prefills, self._decodes)
        return sum(half.engine.compile_count + len(half.programs) for half in halves)

    def warm_up(self) -> None:
        """Compiles every program of this engine's role."""
        if self._role != "generate":
            self._prefills.warm_up(self.weights.current[0])
        if self._role != "prefill":
            self._decodes.warm_up()

    def set_weights(self, params: Params, version: WeightVersion) -> None:
        """Computes with `params` from now on, also what runs already (over its old keys and
        values). Waits for the digest. Raises WeightVersionError if it is not that of `version` or
        the number falls, ValueError for weights that do not fit."""
        self.engine.check_params(params)
        verify_digest(params, version)
        with self._lock:
            check_newer(self.weights.version, version)
            self.weights.current = (params, version)

    # ---- JetStream's, the same in both ---------------------------------------------------------

    def load_params(self, *_: Any, **__: Any) -> Weights:
        """The weights, for the other verbs. Compiles what is not compiled yet: nothing does so
        later."""
        self.warm_up()
        return self.weights

    def init_decode_state(self, *_: Any, **__: Any) -> State:
        """Every slot empty, of the one state that a driver has."""
        with self._lock:
            self._filled[:], self._freed[:] = 0, 0
        return self._decodes.init_state()

    def get_prefix_destination_sharding(self) -> Prefix:
        """Where this engine wants each array of a prefix."""
        whole, row = self._place.whole, row_like(self.engine, 1, self._place)
        kv = jax.tree.map(lambda x: x.sharding, row)
        drawn = Drawn(whole, whole, whole, whole)
        return Prefix(Computed(kv, whole), whole, whole, whole, whole, drawn)

    def get_tokenizer(self) -> Any:
        """Names the tokenizer; `build_tokenizer` gives it, whatever the name."""
        from jetstream.engine import tokenizer_pb2

        return tokenizer_pb2.TokenizerParameters(path=self._tokenizer.name)

    def build_tokenizer(self, metadata: Any = None) -> JetStreamTokenizer:
        """The tokenizer, with no text begun."""
        return JetStreamTokenizer(self._tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self._slots

    @property
    def samples_per_slot(self) -> int:
        """Always 1."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Tokens of the longest prompt; JetStream keeps the end of a longer one."""
        return self._longest_prompt

    @property
    def mesh(self) -> Mesh:
        """The mesh, or one of the only device."""
        return self._place.as_mesh

    @property
    def colocated_cpus(self) -> None:
        """Not used."""
        return None

    # ---- what the verbs do ---------------------------------------------------------------------

    def _prefill(
        self,
        weights: Weights,
        existing: Any,
        padded: Any,
        true_length: int,
        *,
        samples: int = 1,
        seed: int | None = None,
    ) -> tuple[Prefix, Any]:
        """-> a prefix and the result of its first tokens."""
        params, version = _current(weights)
        tokens, cached, known = self._tokens(padded, true_length, existing is None), None, 0
        if existing is not None:
            before = _tokens_before(existing)
            cached, known = existing.cache, len(before)
            tokens = np.concatenate([before, tokens])
        # One token must fit behind the prompt, however it came.
        longest = self.engine.max_length - 1
        if len(tokens) > longest:
            tokens, cached = tokens[-longest:], None
        kv, first = self._prefills.compute(params, version.number, tokens, cached, known)
        seeds, stream = self._seeds(seed), _streams.reserve(self._slots)
        drawn, data, logps = self._prefills.draw(first, seeds, samples, stream)
        numbers = (np.int32(samples), np.int32(stream))
        prefix = Prefix(Computed(kv, np.int32(version.number)), tokens, seeds, *numbers, drawn)
        return prefix, self._make_result(data, logps, samples)

    def _tokens(self, padded: Any, true_length: int, whole: bool) -> np.ndarray:
        """The tokens to compute, int32 [P]: cut to what is there, with nothing that could fail.

        An exception would end the process that serves everybody else. `whole`: nothing is before
        them.
        """
        tokens = np.asarray(padded).reshape(-1).astype(np.int32)[: max(0, int(true_length))]
        if whole and len(tokens) and tokens[0] == NO_BOS:
            tokens = tokens[1:]
        if not len(tokens):
            tokens = np.zeros(1, np.int32)
        return np.clip(tokens, 0, self.engine.model.config.vocab_size - 1)

    def _seeds(self, seed: int | None) -> np.ndarray:
        """uint32 [S, 2], one for each sample that a prompt may have."""
        if seed is None:
            with self._lock:
                request, self._requests = self._requests, self._requests + 1
            seed = (self._seed << 32) + request * self._slots
        return np.stack([seed_words(seed + sample) for sample in range(self._slots)])

    def _insert(self, prefix: Prefix, state: State, slots: Sequence[int]) -> State:
        slots = [min(max(int(slot), 0), self._slots - 1) for slot in slots]
        with self._lock:
            self._filled[slots] += 1
        return self._decodes.place(prefix, state, slots)

    def _generate(self, weights: Weights, state: State) -> tuple[State, Any]:
        params, version = _current(weights)
        with self._lock:
            freed = (self._filled > 0) & (self._freed >= self._filled)
        state, data, logps = self._decodes.step(params, version.number, state, freed)
        return state, self._make_result(data, logps, 1)

    def _free(self, slot: int) -> None:
        # A driver may fill a slot again before it frees it: one call for each time it was filled.
        with self._lock:
            self._freed[slot] = min(self._freed[slot] + 1, self._filled[slot])


def _current(weights: Any) -> tuple[Params, WeightVersion]:
    if not isinstance(weights, Weights):
        raise TypeError(
            f"params must be what load_params gave, which knows its version, "
            f"not {type(weights).__name__}"
        )
    return weights.current


def _tokens_before(existing: Any) -> np.ndarray:
    """int32 [P]: of an `ExistingPrefix` of the later API, or of a prefix itself."""
    tokens = existing.tokens if isinstance(existing, Prefix) else existing.common_prefix_tokens
    return np.asarray(tokens).reshape(-1).astype(np.int32)

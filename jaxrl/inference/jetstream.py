"""Our engine as a `jetstream.engine.engine_api.Engine`, for JetStream's own drivers and servers.

Both APIs of the package are served: that of the published one (0.2.2), and that of its last
development version, here called the later API. The package is imported by `make_engine` alone: it
is an extra, and costs seconds and most of a gigabyte. See docs/jetstream.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.data.tokenizers import Tokenizer
from jaxrl.errors import ConfigError
from jaxrl.inference.engine import Engine
from jaxrl.inference.jetstream_core import DecodeHalf, PrefillHalf
from jaxrl.inference.jetstream_prefix import Prefix, State
from jaxrl.inference.jetstream_programs import Place
from jaxrl.inference.jetstream_results import result_maker
from jaxrl.inference.jetstream_text import LONGEST, SHORTEST
from jaxrl.inference.jetstream_verbs import ROLES, Role, Verbs, Weights
from jaxrl.inference.steps import Params
from jaxrl.models.model import Model
from jaxrl.sharding import DEFAULT_RULES, Rules
from jaxrl.types import SamplingParams, WeightVersion
from jaxrl.weights.digest import verify as verify_digest

_Sampler = Callable[[Any], Any]


def make_engine(
    model: Model,
    params: Params,
    version: WeightVersion,
    tokenizer: Tokenizer,
    *,
    slots: int,
    max_length: int,
    max_prefill_length: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    role: Role = "both",
    chunked_prefill: bool = False,
    verify: bool = True,
    mesh: Mesh | None = None,
    device: jax.Device | None = None,
    rules: Rules = DEFAULT_RULES,
    api: ModuleType | None = None,
    **engine_options: Any,
) -> Any:
    """An instance of JetStream's `Engine` that decodes `slots` sequences with `params`.

    `params` must lie where an `Engine` of the same `mesh` or `device` wants them, and nobody may
    change them. `max_length` bounds prompt and completion together; `max_prefill_length` is a power
    of two below it (default: the largest). Sampling is the same for all requests, since JetStream's
    carry none; `seed` is their common one. `role` says which half is used in disaggregated serving,
    so that only its programs are compiled; both sides need equal `slots`. `chunked_prefill` lets a
    later driver cut prompts itself. `api` stands for the module `jetstream.engine.engine_api`;
    other options are those of `Engine`.

    Raises ConfigError for sizes, roles and sampling that cannot be, WeightVersionError if the
    digest of `params` is not that of `version` (unless `verify` is False), ValueError for weights
    that do not fit, ImportError without the extra `jetstream`.
    """
    if role not in ROLES:
        raise ConfigError(f"role={role!r} must be one of {', '.join(ROLES)}")
    longest = _longest_prompt(max_prefill_length, max_length)
    sampling = _check_sampling(
        SamplingParams(1, temperature, seed, tokenizer.stop_ids, top_k, top_p)
    )
    if api is None:
        from jetstream.engine import engine_api as api
    kind = engine_class(api)
    place = Place(mesh, device, rules)
    engine = functools.partial(
        Engine,
        model,
        max_length=max_length,
        max_stop_tokens=len(sampling.stop_tokens),
        prefill_rows=1,
        steps_per_dispatch=1,
        mesh=mesh,
        device=device,
        rules=rules,
        **engine_options,
    )
    # A prompt is computed on its own, in a state of as few slots as there can be.
    few, many = engine(slots=rules.shards(mesh, "slots")), engine(slots=slots)
    many.check_params(params)
    if verify:
        verify_digest(params, version)
    return kind(
        Weights(params, version),
        tokenizer,
        PrefillHalf(few, sampling, slots, place),
        DecodeHalf(many, sampling, place, ahead=kind.ahead, end=tokenizer.eos_id),
        result_maker(api),
        place=place,
        seed=seed,
        max_prefill_length=longest,
        role=role,
        chunked_prefill=chunked_prefill,
    )


@functools.cache
def engine_class(api: ModuleType) -> type[Verbs]:
    """The subclass of `api.Engine` for the API that `api` has."""
    # Only the later API has this name.
    verbs = LaterVerbs if hasattr(api, "JetStreamEngine") else PublishedVerbs
    return type("JaxrlEngine", (verbs, api.Engine), {"__doc__": verbs.__doc__})


class PublishedVerbs(Verbs):
    """The verbs of 0.2.2: the first `generate` tells the first token."""

    def prefill(
        self, *, params: Weights, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> Prefix:
        """One prompt, int [L] of which the first `true_length` count -> its prefix. It goes on
        where the prompt of `existing_prefix` ends, if there is one."""
        return self._prefill(params, existing_prefix, padded_tokens, true_length)[0]

    def generate(self, params: Weights, decode_state: State) -> tuple[State, Any]:
        """One token for each slot -> (state, result). The old state is given away."""
        return self._generate(params, decode_state)

    def insert(self, prefix: Prefix, decode_state: State, slot: int) -> State:
        """Begins a sequence in `slot`. The old state is given away, the prefix stays whole."""
        return self._insert(prefix, decode_state, [slot])


class LaterVerbs(Verbs):
    """The verbs of the last development version: prefill tells the first token.

    Sampling is the engine's own, so that log-probabilities are those of what was sampled from: a
    `sampler` is refused with `ValueError`.
    """

    ahead = True

    def prefill(
        self,
        *,
        params: Weights,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        sampler: _Sampler | None = None,
        request_id: Any = None,
    ) -> tuple[Prefix, Any]:
        """One prompt, int [L] of which the first `true_length` count -> (its prefix, the result of
        its first token). It goes on where the tokens of `existing_prefix` end, if there is one."""
        _refuse(sampler)
        return self._prefill(params, existing_prefix, padded_tokens, true_length)

    def prefill_multisampling(
        self,
        *,
        params: Weights,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        sampler: _Sampler | None = None,
        rng: Any = None,
        num_samples: int = 1,
        request_id: Any = None,
    ) -> tuple[Prefix, Any]:
        """`prefill` with a first token for each of `num_samples` samples, at most one a slot.

        `rng` (a key of jax.random) takes the place of the common seed.
        """
        _refuse(sampler)
        samples = min(max(int(num_samples), 1), self.max_concurrent_decodes)
        seed = None if rng is None else _seed_of(rng)
        return self._prefill(
            params, existing_prefix, padded_tokens, true_length, samples=samples, seed=seed
        )

    def generate(
        self, params: Weights, decode_state: State, sampler: _Sampler | None = None
    ) -> tuple[State, Any]:
        """One token for each slot -> (state, result). The old state is given away."""
        _refuse(sampler)
        return self._generate(params, decode_state)

    def insert(
        self, prefix: Prefix, decode_state: State, slot: int, request_id: Any = None
    ) -> State:
        """Begins a sequence in `slot`. The old state is given away, the prefix stays whole."""
        return self._insert(prefix, decode_state, [slot])

    def bulk_insert(self, prefix: Prefix, decode_state: State, slots: Sequence[int]) -> State:
        """Begins a sequence in each of `slots`: sample i in slot i. Where samples are fewer, the
        last one's first token goes on in all slots that are left, each with a seed of its own."""
        return self._insert(prefix, decode_state, slots)

    def free_resource(self, slot: int) -> None:
        """Nobody wants any more what is in `slot`: it is decoded no further.

        Call it once for each time that the slot was filled; it may have been filled again by then.
        """
        self._free(slot)

    @property
    def use_chunked_prefill(self) -> bool:
        """Whether the driver shall cut prompts itself; `prefill` cuts long ones in any case."""
        return self._chunked

    @property
    def prefill_chunk_size(self) -> int:
        """Tokens of the pieces that prompts are computed in."""
        return self.engine.prefill_chunk


def _refuse(sampler: _Sampler | None) -> None:
    if sampler is not None:
        raise ValueError(
            f"sampler={sampler!r} must be None: sampling is the engine's own, because "
            "log-probabilities are; pass make_engine a temperature"
        )


def _seed_of(rng: Any) -> int:
    """The last 64 bits of a key of jax.random."""
    typed = isinstance(rng, jax.Array) and jax.dtypes.issubdtype(rng.dtype, jax.dtypes.prng_key)
    words = np.asarray(jax.random.key_data(rng) if typed else rng).reshape(-1)[-2:]
    return int.from_bytes(words.astype(">u4").tobytes(), "big")


def _longest_prompt(asked: int | None, max_length: int) -> int:
    """A power of two below `max_length`, as JetStream wants it. Raises ConfigError."""
    if max_length <= SHORTEST:
        raise ConfigError(
            f"max_length={max_length} must be above {SHORTEST}, the least that JetStream pads to"
        )
    most = min(LONGEST, 1 << (max_length - 1).bit_length() - 1)
    longest = most if asked is None else asked
    if longest not in {1 << i for i in range(4, 16)} or longest > most:
        raise ConfigError(
            f"max_prefill_length={asked} must be a power of two from {SHORTEST} to {most}, "
            f"below max_length={max_length}"
        )
    return longest


def _check_sampling(sampling: SamplingParams) -> SamplingParams:
    """`sampling`, which nobody checks later. Raises ConfigError."""
    if not 0 <= sampling.temperature < float("inf"):
        raise ConfigError(f"temperature={sampling.temperature} must be finite and at least 0")
    if sampling.top_k < 0 or not 0 < sampling.top_p <= 1:
        raise ConfigError(
            f"top_k={sampling.top_k} must be at least 0 and top_p={sampling.top_p} above 0 and at "
            "most 1"
        )
    return sampling

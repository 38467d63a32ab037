"""Sampling requests: the checks at the door, and what a request gathers while it is decoded."""

from __future__ import annotations

import dataclasses
import math
import time
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxrl.errors import DriverError, RequestError
from jaxrl.inference.state import FIELDS
from jaxrl.inference.streaming import Channel, Chunk
from jaxrl.types import Completion, SamplingParams

_INTEGERS = ("max_tokens", "seed", "top_k", "top_logprobs")
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can serve."""

    vocab_size: int
    max_length: int
    max_stop_tokens: int
    top_logprobs: int = 0


def check_request(
    tokens: Any, params: SamplingParams, limits: Limits
) -> tuple[np.ndarray, SamplingParams]:
    """The prompt as int32 [P], and `params` in Python's own numbers. Raises RequestError naming the
    value and the rule."""
    prompt, params = _check_prompt(tokens, limits), _check_params(params, limits)
    total = len(prompt) + params.max_tokens
    if total > limits.max_length:
        raise RequestError(
            f"prompt of {len(prompt)} tokens + max_tokens={params.max_tokens} = {total} "
            f"is beyond the context of {limits.max_length} tokens"
        )
    return prompt, params


def deadline_of(timeout: float | None) -> float:
    """When a request of now is late, on the clock `time.monotonic`. Raises RequestError."""
    if timeout is None:
        return math.inf
    seconds = _number("timeout", timeout)
    if not seconds > 0:
        raise RequestError(f"timeout={timeout} must be positive seconds")
    return time.monotonic() + seconds


def _check_prompt(tokens: Any, limits: Limits) -> np.ndarray:
    try:
        prompt = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"the prompt must be a flat list of tokens: {error}") from None
    if prompt.ndim != 1:
        raise RequestError(f"the prompt must be a flat list of tokens, got shape {prompt.shape}")
    if prompt.size == 0:
        raise RequestError("the prompt is empty: it must hold at least 1 token")
    if prompt.dtype.kind not in "iu":
        raise RequestError(f"prompt tokens must be integers, got {prompt.dtype}")
    outside = np.flatnonzero((prompt < 0) | (prompt >= limits.vocab_size))
    if outside.size:
        raise RequestError(
            f"prompt token {prompt[outside[0]]} at position {outside[0]} is outside the "
            f"vocabulary, 0 to {limits.vocab_size - 1}"
        )
    # A copy: the caller may change its array before the request's turn comes.
    return np.array(prompt, np.int32)


def _check_params(params: SamplingParams, limits: Limits) -> SamplingParams:
    # A copy here, too, and no numpy scalars, whose sums overflow: what only the driver's thread
    # would stumble over fails the requests of everybody.
    params = dataclasses.replace(
        params,
        **{name: _integer(name, getattr(params, name)) for name in _INTEGERS},
        **{name: _number(name, getattr(params, name)) for name in ("temperature", "top_p")},
        stop_tokens=_check_stops(params.stop_tokens, limits),
    )
    if params.max_tokens < 1:
        raise RequestError(f"max_tokens={params.max_tokens!r} must be an integer of at least 1")
    if not math.isfinite(params.temperature) or params.temperature < 0:
        raise RequestError(f"temperature={params.temperature!r} must be finite and at least 0")
    if params.temperature and not _SMALLEST <= params.temperature <= _LARGEST:
        raise RequestError(
            f"temperature={params.temperature!r} must be 0 or between {_SMALLEST:.2g} and "
            f"{_LARGEST:.2g}, which float32 holds"
        )
    if not 0 <= params.top_k < 2**31:
        raise RequestError(f"top_k={params.top_k!r} must be an integer from 0 (all) to 2**31 - 1")
    if not _SMALLEST <= params.top_p <= 1:
        raise RequestError(f"top_p={params.top_p!r} must be above 0 and at most 1")
    if not 0 <= params.top_logprobs <= limits.top_logprobs:
        raise RequestError(
            f"top_logprobs={params.top_logprobs!r} must be an integer from 0 to "
            f"{limits.top_logprobs}, the most that the engine was made for"
        )
    return params


def _check_stops(stop_tokens: Any, limits: Limits) -> tuple[int, ...]:
    try:
        stops = tuple(stop_tokens)
    except TypeError:
        raise RequestError(f"stop_tokens={stop_tokens!r} must be several tokens") from None
    if len(stops) > limits.max_stop_tokens:
        raise RequestError(
            f"{len(stops)} stop tokens: at most {limits.max_stop_tokens} are allowed"
        )
    for token in stops:
        if not _is_int(token) or not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"stop token {token!r} is outside the vocabulary, 0 to {limits.vocab_size - 1}"
            )
    return tuple(int(token) for token in stops)


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _integer(name: str, value: Any) -> int:
    if not _is_int(value):
        raise RequestError(f"{name}={value!r} must be an integer")
    return int(value)


def _number(name: str, value: Any) -> float:
    try:
        # `float` would read texts, too.
        return value * 1.0 if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{name}={value!r} must be a number") from None


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One request on its way. `number` counts arrivals; `future` gets a Completion or an error;
    `channel`, if there is one, gets the tokens as they come; it was told `told` of them before the
    dispatch that gives them out. After `deadline` (of `time.monotonic`) nobody wants it any
    more."""

    number: int
    prompt: np.ndarray
    params: SamplingParams
    future: Future
    channel: Channel | None = None
    deadline: float = math.inf
    results: list[np.ndarray] = dataclasses.field(default_factory=list)
    given: int = 0
    told: int = 0
    finished: bool = False

    @property
    def key(self) -> bytes:
        """Equal for equal prompts."""
        return self.prompt.tobytes()

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far: the entries of its cache that count."""
        return len(self.prompt) + self.given

    @property
    def longest(self) -> int:
        """Tokens of prompt and completion at most."""
        return len(self.prompt) + self.params.max_tokens

    def tokens(self) -> np.ndarray:
        """Prompt and completion so far, int32 [length]."""
        return np.concatenate([self.prompt, *(r[:, 0] for r in self.results)])

    def tell(self, row: np.ndarray) -> None:
        """The token that the next dispatch gives out first, int32 [F], is known already."""
        self.channel.put(Chunk(**self._arrays(row[None])))
        self.told = 1

    def take(self, result: np.ndarray) -> None:
        """Adds one dispatch's result for this slot, int32 [k, F]; for F see `state.FIELDS`."""
        valid = result[result[:, 1] > 0]
        if not len(valid):
            return
        # A copy of the few rows: a view would keep the whole dispatch's result alive.
        self.results.append(valid.copy())
        self.given += len(valid)
        told, self.told = self.told, 0
        if self.channel is not None and len(valid) > told:
            self.channel.put(Chunk(**self._arrays(self.results[-1][told:])))
        stopped = int(valid[-1, 0]) in self.params.stop_tokens
        self.finished = stopped or self.given >= self.params.max_tokens

    def completion(self, tokenizer: Any = None) -> Completion:
        """The finished completion; raises DriverError if the weights gave numbers that are none."""
        arrays = self._arrays(np.concatenate(self.results))
        tokens, logprobs, versions = (arrays[name] for name in ("tokens", "logprobs", "versions"))
        bad = np.flatnonzero(~np.isfinite(logprobs))
        if bad.size:
            raise DriverError(
                f"weights of version {versions[bad[0]]} gave log-probability "
                f"{logprobs[bad[0]]} for token {bad[0]} of the completion: it must be finite"
            )
        stopped = int(tokens[-1]) in self.params.stop_tokens
        text = ""
        if tokenizer is not None:
            text = tokenizer.decode([int(t) for t in (tokens[:-1] if stopped else tokens)])
        reason = "stop" if stopped else "length"
        return Completion(finish_reason=reason, text=text, **arrays)

    def _arrays(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Rows int32 [k, F] of the engine's results -> the arrays of a chunk or completion."""
        arrays = {
            "tokens": np.ascontiguousarray(rows[:, 0]),
            "logprobs": np.ascontiguousarray(rows[:, 3]).view(np.float32),
            "versions": np.ascontiguousarray(rows[:, 2]),
        }
        wanted = self.params.top_logprobs
        if wanted:
            most = (rows.shape[1] - FIELDS) // 2
            tokens, logps = rows[:, FIELDS : FIELDS + wanted], rows[:, FIELDS + most :][:, :wanted]
            arrays["top_tokens"] = np.ascontiguousarray(tokens)
            arrays["top_logprobs"] = np.ascontiguousarray(logps).view(np.float32)
        return arrays

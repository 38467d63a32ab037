"""Requests of OpenAI's API, read and encoded; everything that is wrong with one is found here."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.errors import RequestError
from jaxrl.serving.backend import Backend
from jaxrl.serving.errors import FieldError, ModelNotFoundError
from jaxrl.serving.fields import Fields, parse_object
from jaxrl.serving.generation import Generate, check_stop
from jaxrl.serving.openai_prompts import MAX_PROMPTS, encode_chat, read_messages, read_prompts
from jaxrl.types import SamplingParams

MAX_CHOICES = MAX_PROMPTS
"""The most completions of one request: its prompts times `n`."""

MAX_INTEGER = 2**31 - 1
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.001, 2.0
DEFAULT_TOKENS = 16
"""The longest completion where a request for one does not say; that of a chat is what fits."""

IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
"""Fields of OpenAI's that change nothing about an answer here."""

_SEEDS = 1 << 53
"""Seeds that are drawn or derived stay exact in JSON, whose numbers many read as floats."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request that can be served: `n` completions for each of `prompts` int32 [P].

    `params` holds the seed of the first completion. `logprobs` is how many alternatives are shown
    beside each token; None: no log-probabilities at all.
    """

    prompts: tuple[np.ndarray, ...]
    params: SamplingParams
    n: int
    stop: tuple[str, ...]
    logprobs: int | None
    token_ids: bool
    stream: bool
    include_usage: bool

    def seed(self, index: int) -> int:
        """The seed of completion `index`; the first one has that of the request."""
        return self.params.seed if index == 0 else derived_seed(self.params.seed, index)

    def generations(self) -> list[Generate]:
        """What is to be generated, prompt by prompt."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.n)]
        return [
            Generate(prompt, dataclasses.replace(self.params, seed=self.seed(index)), self.stop)
            for index, prompt in enumerate(prompts)
        ]


def derived_seed(seed: int, index: int) -> int:
    """A seed for completion `index` of a request: no two are the same by any simple rule."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _SEEDS


_NOT_IN_CHATS: Mapping[str, Sequence[Any]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
}


def read_completion(raw: bytes, backend: Backend) -> Ask:
    """The body of /v1/completions. Raises `FieldError`, or `DataError` for text that the tokenizer
    does not know."""
    fields = Fields(parse_object(raw))
    _check_model(fields, backend)
    prompts = read_prompts(fields, backend)
    logprobs = fields.integer("logprobs", None, 0, backend.driver.engine.top_logprobs)
    fields.only("echo", [False], "the prompt is not part of the answer")
    fields.only("suffix", [""], "models here only go on with a text")
    fields.only("best_of", [1], "every completion is returned: use n")
    longest = fields.integer("max_tokens", DEFAULT_TOKENS, 1, MAX_INTEGER)
    return _ask(fields, backend, prompts, logprobs, longest, "prompt")


def read_chat(raw: bytes, backend: Backend) -> Ask:
    """The body of /v1/chat/completions. Raises `FieldError`, or `DataError` for what the model's
    template refuses."""
    fields = Fields(parse_object(raw))
    _check_model(fields, backend)
    if backend.chat is None:
        why = f"the model {backend.name} has no chat template: use /v1/completions"
        raise FieldError(why, "messages", "no_chat_template")
    tokens = encode_chat(backend, read_messages(fields))
    shown = fields.boolean("logprobs")
    alternatives = fields.integer("top_logprobs", None, 0, backend.driver.engine.top_logprobs)
    if alternatives is not None and not shown:
        raise fields.error("top_logprobs", f'{alternatives} needs "logprobs": true')
    for field, allowed in _NOT_IN_CHATS.items():
        fields.only(field, allowed, "answers are plain text")
    longest = fields.integer("max_completion_tokens", None, 1, MAX_INTEGER)
    old_name = fields.integer("max_tokens", None, 1, MAX_INTEGER)
    if None not in (longest, old_name) and longest != old_name:
        raise fields.error("max_tokens", f"{old_name} and max_completion_tokens={longest} differ")
    longest = old_name if longest is None else longest
    if longest is None:
        longest = max(1, backend.driver.engine.max_length - len(tokens))
    logprobs = (alternatives or 0) if shown else None
    return _ask(fields, backend, [tokens], logprobs, longest, "messages")


def _check_model(fields: Fields, backend: Backend) -> None:
    name = fields.text("model", backend.name)
    if name != backend.name:
        raise ModelNotFoundError(
            f"there is no model {name[:80]!r} here: this server has {backend.name!r}", "model"
        )


def _ask(
    fields: Fields,
    backend: Backend,
    prompts: Sequence[np.ndarray],
    logprobs: int | None,
    longest: int,
    source: str,
) -> Ask:
    """The fields that both kinds of requests have; then none may be left."""
    _check_lengths(prompts, longest, backend.driver.engine.max_length, source)
    n = fields.integer("n", 1, 1, MAX_CHOICES)
    _check_count(fields, len(prompts), n, backend.max_waiting)
    params = _params(fields, backend, longest, logprobs or 0)
    stop = _stop(fields)
    for field, allowed in _NOT_SUPPORTED.items():
        fields.only(field, allowed, "what was sampled would not be what the model says")
    token_ids = fields.boolean("return_token_ids")
    stream = fields.boolean("stream")
    include_usage = _stream_options(fields, stream)
    fields.finish(IGNORED)
    return Ask(tuple(prompts), params, n, stop, logprobs, token_ids, stream, include_usage)


_NOT_SUPPORTED: Mapping[str, Sequence[Any]] = {
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0, 0.0],
    "logit_bias": [{}],
}


def _params(fields: Fields, backend: Backend, longest: int, top_logprobs: int) -> SamplingParams:
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    temperature = fields.number("temperature", 1.0, 0, MAX_TEMPERATURE)
    if 0 < temperature < MIN_TEMPERATURE:
        raise fields.error("temperature", f"{temperature} must be 0 or at least {MIN_TEMPERATURE}")
    return SamplingParams(
        longest,
        temperature=temperature,
        seed=secrets.randbelow(_SEEDS) if seed is None else seed,
        stop_tokens=_stop_tokens(fields, backend),
        top_k=max(0, fields.integer("top_k", 0, -1, MAX_INTEGER)),
        top_p=fields.number("top_p", 1.0, 0, 1),
        top_logprobs=top_logprobs,
    )


def _stop_tokens(fields: Fields, backend: Backend) -> tuple[int, ...]:
    """The tokens that end a completion: those that end a text, and those of the request."""
    given = fields.take("stop_token_ids") or []
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise FieldError("stop_token_ids must be a list of token ids", "stop_token_ids")
    size = backend.driver.engine.model.config.vocab_size if given else 0
    for token in given:
        if not 0 <= token < size:
            rule = f"must hold whole numbers from 0 to {size - 1}"
            raise FieldError(f"stop_token_ids={_short(token)} {rule}", "stop_token_ids")
    ends = () if fields.boolean("ignore_eos") else backend.stop_ids
    return tuple(dict.fromkeys((*ends, *given)))


def _short(token: int) -> str:
    return str(token) if abs(token) < 1 << 64 else "(a huge number)"


def _check_lengths(prompts: Sequence[np.ndarray], new: int, most: int, source: str) -> None:
    longest = max(map(len, prompts))
    if longest + new > most:
        raise FieldError(
            f"prompt of {longest} tokens + {new} new ones = {longest + new} is beyond the context "
            f"of {most} tokens",
            source if longest >= most else "max_tokens",
            "context_length_exceeded",
        )


def _check_count(fields: Fields, prompts: int, n: int, max_waiting: int | None) -> None:
    """More completions than may wait would never be taken."""
    most = MAX_CHOICES if max_waiting is None else min(MAX_CHOICES, max_waiting)
    if prompts * n > most:
        raise fields.error("n", f"{n} for {prompts} prompts: at most {most} completions together")


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    stop = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise FieldError("stop must be a text or a list of texts", "stop")
    try:
        check_stop(stop)
    except RequestError as error:
        raise FieldError(str(error), "stop") from None
    return tuple(stop)


def _stream_options(fields: Fields, stream: bool) -> bool:
    """Whether usage is asked for at the end of a stream."""
    value = fields.take("stream_options")
    if value is None:
        return False
    if not stream:
        raise FieldError('stream_options needs "stream": true', "stream_options")
    if not isinstance(value, dict):
        raise FieldError("stream_options must be an object", "stream_options")
    options = Fields(value, "stream_options")
    include_usage = options.boolean("include_usage")
    options.finish(["include_obfuscation"])
    return include_usage

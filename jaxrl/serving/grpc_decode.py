"""A Decode call of JetStream's protocol: what it asks the sampler, and its answers in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
from google.protobuf.message import Message

from jaxrl.data.tokenizers import Tokenizer
from jaxrl.errors import DeadlineError, RequestError
from jaxrl.serving import protocol
from jaxrl.serving.backend import Backend
from jaxrl.serving.generation import Generate, Piece
from jaxrl.serving.merging import merged
from jaxrl.serving.openai_prompts import check_characters
from jaxrl.serving.openai_requests import MIN_TEMPERATURE, derived_seed
from jaxrl.types import SamplingParams, WeightVersion

MAX_SAMPLES = 128
"""The most completions of one request."""

SMALLEST = {"temperature": MIN_TEMPERATURE, "top_p": 1e-6}
"""Below these the model's float32 numbers overflow, or nothing is left to sample from."""


async def decode(
    backend: Backend, request: Message, time_remaining: float | None
) -> AsyncIterator[Message]:
    """A DecodeRequest -> the DecodeResponses, each with one entry for every sample.

    `time_remaining` in seconds is what the call's deadline leaves (None: no deadline). Raises what
    `Backend.generate` raises, and `RequestError` or `DataError` for a request that makes no sense.
    Closing the generator cancels what runs.
    """
    backend.ready()
    if time_remaining is not None and time_remaining <= 0:
        raise DeadlineError("the call's deadline was over before the request was read")
    # Encoding a long text takes a while: not here, where every other call would wait for it.
    generates = await asyncio.to_thread(generates_of, request, backend)
    limits = [generates[0].timeout, time_remaining, backend.timeout_s]
    timeout = min((limit for limit in limits if limit is not None), default=None)
    answer = Answer(request, len(generates[0].tokens), backend.version)
    samples = [backend.generate(dataclasses.replace(g, timeout=timeout)) for g in generates]
    async with contextlib.aclosing(merged(samples)) as pieces:
        async for index, piece in pieces:
            yield answer.response(index, piece)


def generates_of(request: Message, backend: Backend) -> list[Generate]:
    """A DecodeRequest -> what to generate for each of its samples. Raises as `decode` does."""
    _refuse_unsupported(request)
    samples = _samples(request, backend.max_waiting)
    check_characters(len(request.text_content.text), backend, "text_content")
    tokens = prompt_of(request, backend.tokenizer)
    timeout = request.timeout_seconds if request.HasField("timeout_seconds") else None
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise RequestError(f"timeout_seconds={timeout} must be finite and more than 0")
    params = _params(request, backend.stop_ids)
    # As for the choices of a request over HTTP: equal seeds give equal completions there and here.
    seeds = [params.seed, *(derived_seed(params.seed, i) for i in range(1, samples))]
    return [
        Generate(tokens, dataclasses.replace(params, seed=seed), tuple(request.stop), timeout)
        for seed in seeds
    ]


def _refuse_unsupported(request: Message) -> None:
    """What would otherwise be left out in silence."""
    for name in ("session_cache", "lora_adapter_id"):
        value = getattr(request, name)
        if value:
            raise RequestError(f"{name}={value[:80]!r} is not supported: it must be empty")


def _samples(request: Message, max_waiting: int | None) -> int:
    """How many completions; more than may wait would never be taken."""
    most = MAX_SAMPLES if max_waiting is None else min(MAX_SAMPLES, max_waiting)
    if not 0 <= request.num_samples <= most:
        raise RequestError(
            f"num_samples={request.num_samples} must be from 1 to {most}, or 0 for 1"
        )
    return request.num_samples or 1


def prompt_of(request: Message, tokenizer: Tokenizer) -> np.ndarray:
    """The prompt as the model sees it, int32 [P]. Raises `RequestError` if the client's is empty.

    What the tokenizer wants before a text is put before it, before token ids too, as JetStream's
    server does; but not if the prompt begins with it already, and not with `has_bos`.
    """
    if request.HasField("text_content"):
        tokens = tokenizer.encode(request.text_content.text)
    else:
        tokens = list(request.token_content.token_ids)
    if not tokens:
        raise RequestError("the prompt is empty: it must hold at least 1 token")
    prefix = [] if request.has_bos else list(tokenizer.prompt_prefix)
    if tokens[: len(prefix)] != prefix:
        tokens = prefix + tokens
    return np.array(tokens, np.int32)


def _params(request: Message, stop_ids: Sequence[int]) -> SamplingParams:
    """The sampling parameters. The driver checks the other values."""
    given = {
        name: getattr(request, name)
        for name in ("temperature", "top_k", "top_p")
        if request.HasField(name)
    }
    for name, least in SMALLEST.items():
        if 0 < given.get(name, 0) < least:
            raise RequestError(f"{name}={given[name]} is too small: it must be at least {least}")
    seed = request.seed if request.HasField("seed") else secrets.randbits(53)
    stops = tuple(dict.fromkeys((*stop_ids, *request.stop_token_ids)))
    return SamplingParams(
        request.max_tokens,
        seed=seed,
        stop_tokens=stops,
        top_logprobs=request.top_logprobs,
        **given,
    )


class Answer:
    """Makes the responses of one request: pieces in, messages out.

    Every response has an entry for each sample, empty where nothing came: published clients read
    the first one without a look. The weights are told with the first token of each version, the
    usage with the last piece of the last sample.
    """

    def __init__(
        self, request: Message, prompt_tokens: int, version_of: Callable[[int], WeightVersion]
    ):
        self._samples = request.num_samples or 1
        self._top_logprobs = request.top_logprobs > 0
        self._logprobs = request.logprobs or self._top_logprobs
        self._prompt_tokens = prompt_tokens
        self._version_of = version_of
        self._told: set[int] = set()
        self._completion_tokens = 0
        self._running = self._samples

    def response(self, index: int, piece: Piece) -> Message:
        """What sample `index` has gained -> a DecodeResponse."""
        response = protocol.DecodeResponse()
        samples = [response.stream_content.samples.add() for _ in range(self._samples)]
        self._fill(samples[index], piece)
        for number in sorted(set(piece.versions) - self._told):
            version = self._version_of(number)
            response.weights.add(number=version.number, digest=version.digest)
        self._told.update(piece.versions)
        if not self._running:
            response.usage.prompt_tokens = self._prompt_tokens
            response.usage.completion_tokens = self._completion_tokens
        return response

    def _fill(self, sample: Message, piece: Piece) -> None:
        sample.text = piece.text
        sample.token_ids.extend(piece.tokens)
        sample.weight_versions.extend(piece.versions)
        if self._logprobs:
            sample.logprobs.extend(piece.logprobs)
        for alternatives in piece.top if self._top_logprobs else ():
            entry = sample.top_logprobs.add()
            entry.token_ids.extend(token for token, _ in alternatives)
            entry.logprobs.extend(logprob for _, logprob in alternatives)
        self._completion_tokens += len(piece.tokens)
        if piece.finish_reason is not None:
            sample.finish_reason = piece.finish_reason
            self._running -= 1

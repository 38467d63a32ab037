"""Makes the sampling side of a run from its config: engine, driver, reward pool, text in and
out."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.config import ExperimentConfig
from jaxrl.data.examples import Example
from jaxrl.data.prompts import encode_prompt
from jaxrl.data.streaming import TextDecoder
from jaxrl.errors import RequestError
from jaxrl.inference.driver import Driver
from jaxrl.inference.engine import Engine
from jaxrl.orchestration import hosts
from jaxrl.orchestration.session import Parts
from jaxrl.rewards.pool import RewardPool
from jaxrl.types import Completion, SamplingParams, WeightVersion


def make_engine(parts: Parts, max_length: int = 0) -> Engine:
    """The decode engine: the cache holds `max_length` tokens a slot, by default the longest prompt
    and completion of the config."""
    config = parts.config
    return Engine(
        parts.served_model,
        slots=config.rollout.slots // hosts.count(),
        max_length=max_length or config.longest_sampled,
        prefill_buckets=config.prompt_buckets,
        steps_per_dispatch=config.rollout.steps_per_dispatch,
        max_stop_tokens=max(8, len(parts.stop_ids)),
        mesh=parts.sampler_mesh,
    )


def make_driver(
    parts: Parts,
    params: Any,
    version: WeightVersion,
    *,
    max_length: int = 0,
    verify: bool = True,
) -> Driver:
    """A started driver that serves `params`, which belong to it from then on."""
    driver = Driver(
        make_engine(parts, max_length),
        params,
        version,
        in_flight=parts.config.rollout.in_flight,
        tokenizer=parts.tokenizer,
        verify=verify,
    )
    return driver.start()


def make_driver_for(
    parts: Parts,
    params: Any,
    version: WeightVersion,
    prompts: Sequence[np.ndarray],
    *,
    new_tokens: int,
) -> Driver:
    """A started driver for these prompts int [P] alone, which compiles no more than they need.

    `params` belong to it from then on, and were verified: their digest is not computed again.
    Raises `RequestError` if a prompt and `new_tokens` are longer than the model takes.
    """
    config, most = parts.config, parts.model.config.max_length
    longest = max(map(len, prompts))
    if longest + new_tokens > most:
        raise RequestError(
            f"prompt of {longest} tokens + {new_tokens} new ones = {longest + new_tokens} is "
            f"beyond the {most} tokens that the model takes (model.max_length)"
        )
    buckets = [*(b for b in config.prompt_buckets if b < most), most]
    needed = sorted({next(b for b in buckets if b >= len(prompt)) for prompt in prompts})
    length = min(needed[-1] + new_tokens, most)
    shards = parts.slot_shards
    engine = Engine(
        parts.served_model,
        slots=-(-min(config.rollout.slots, len(prompts)) // shards) * shards,
        max_length=length,
        prefill_buckets=needed,
        attend_buckets=(length,),
        steps_per_dispatch=config.rollout.steps_per_dispatch,
        max_stop_tokens=max(8, len(parts.stop_ids)),
        mesh=parts.sampler_mesh,
    )
    driver = Driver(engine, params, version, tokenizer=parts.tokenizer, verify=False)
    return driver.start(prefill_buckets=needed)


def make_pool(config: ExperimentConfig) -> RewardPool:
    """The started reward processes."""
    rewards = config.rewards
    pool = RewardPool(rewards.scorer, workers=rewards.workers, timeout_s=rewards.timeout_s)
    return pool.start()


def eval_params(parts: Parts) -> SamplingParams:
    """How evaluation samples."""
    return SamplingParams(
        max_tokens=parts.config.eval_new_tokens,
        temperature=parts.config.eval.temperature,
        stop_tokens=parts.stop_ids,
    )


def text_request(
    parts: Parts,
    text: str,
    *,
    max_new_tokens: int = 0,
    temperature: float | None = None,
    seed: int = 0,
    raw: bool = False,
) -> tuple[np.ndarray, SamplingParams]:
    """A prompt by hand -> its tokens int32 [P], and how to sample; as for `TextSampler.generate`.

    Raises `RequestError` for an empty prompt.
    """
    if not text.strip():
        raise RequestError(f"prompt {text!r} is empty: it must hold something to complete")
    config = parts.config
    example = as_example("" if raw else config.data.prompt_template, text)
    params = SamplingParams(
        max_tokens=max_new_tokens or config.eval_new_tokens,
        temperature=config.eval.temperature if temperature is None else temperature,
        seed=seed,
        stop_tokens=parts.stop_ids,
    )
    return encode_prompt(example, parts.tokenizer, None if raw else parts.chat), params


class TextSampler:
    """Text in, completion out, under the weights that the driver serves.

    >>> sampler.generate("stone").text  # doctest: +SKIP
    'enots'
    """

    def __init__(self, driver: Driver, parts: Parts):
        self._driver = driver
        self._parts = parts

    def generate(
        self,
        text: str,
        *,
        max_new_tokens: int = 0,
        temperature: float | None = None,
        seed: int = 0,
        raw: bool = False,
    ) -> Completion:
        """Complete one prompt; 0 and None mean what evaluation uses.

        `text` fills `data.prompt_template` when that has a single field, and is encoded as the
        prompts of training are, in a chat if they are; `raw` makes it the template itself, special
        tokens and all, without a chat.
        Raises `RequestError` for an empty or too long prompt.
        """
        tokens, params = text_request(
            self._parts,
            text,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            raw=raw,
        )
        return self._driver.sample_blocking(tokens, params)


class TextPieces:
    """The text of one completion while it is decoded: iterate once, then read `completion`.

    The pieces are whole characters, and together the completion's text. Leaving early cancels it.
    `first_chunk` is the number of tokens that came first, all at once (0: none yet).
    """

    def __init__(self, driver: Driver, tokens: np.ndarray, params: SamplingParams):
        self._stream = driver.stream(tokens, params)
        self._tokenizer, self._stops = driver.tokenizer, params.stop_tokens
        self.first_chunk = 0

    def __iter__(self) -> Iterator[str]:
        decoder = TextDecoder(self._tokenizer)
        with self._stream:
            for chunk in self._stream:
                self.first_chunk = self.first_chunk or len(chunk.tokens)
                # A stop token ends the completion and is not part of its text.
                shown = [int(t) for t in chunk.tokens if int(t) not in self._stops]
                yield decoder.push(shown)
            yield decoder.finish()

    def close(self) -> None:
        """Cancel what has not been decoded yet."""
        self._stream.close()

    @property
    def completion(self) -> Completion:
        """The whole completion."""
        return self._stream.completion


def as_example(template: str, text: str) -> Example:
    """`text` in the only field of `template`, in a template of its own where there is none to fill,
    and alone where there are several."""
    fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    if not fields:
        return Example(text, "", template=text.replace("{", "{{").replace("}", "}}"))
    if len(fields) > 1:
        return Example(text, "")
    return Example(text, "", metadata={fields[0]: text}, template=template)

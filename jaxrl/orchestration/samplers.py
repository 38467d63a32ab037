"""Makes the sampling side of a run from its config: engine, driver, reward pool, text in and
out."""

from __future__ import annotations

import string
from typing import Any

from jaxrl.config import ExperimentConfig
from jaxrl.data.examples import Example
from jaxrl.data.prompts import encode_prompt
from jaxrl.errors import RequestError
from jaxrl.inference.driver import Driver
from jaxrl.inference.engine import Engine
from jaxrl.orchestration.session import Parts
from jaxrl.rewards.pool import RewardPool
from jaxrl.types import Completion, SamplingParams, WeightVersion


def make_engine(parts: Parts, max_length: int = 0) -> Engine:
    """The decode engine: the cache holds `max_length` tokens a slot, by default the longest prompt
    and completion of the config."""
    config = parts.config
    longest = max(config.rollout.max_new_tokens, config.eval_new_tokens)
    return Engine(
        parts.model,
        slots=config.rollout.slots,
        max_length=max_length or config.data.max_prompt_tokens + longest,
        prefill_buckets=prompt_buckets(config),
        steps_per_dispatch=config.rollout.steps_per_dispatch,
        max_stop_tokens=max(8, len(parts.stop_ids)),
        mesh=parts.mesh,
    )


def prompt_buckets(config: ExperimentConfig) -> tuple[int, ...]:
    """Prompt lengths to compile for: those of the config, or powers of two and the longest."""
    longest = config.data.max_prompt_tokens
    powers = tuple(1 << i for i in range(3, 32) if 1 << i < longest)
    return config.rollout.prefill_buckets or (*powers, longest)


def make_driver(
    parts: Parts, params: Any, version: WeightVersion, *, max_length: int = 0
) -> Driver:
    """A started driver that serves `params`, which belong to it from then on."""
    driver = Driver(
        make_engine(parts, max_length),
        params,
        version,
        in_flight=parts.config.rollout.in_flight,
        tokenizer=parts.tokenizer,
    )
    return driver.start()


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
        if not text.strip():
            raise RequestError(f"prompt {text!r} is empty: it must hold something to complete")
        config = self._parts.config
        example = as_example("" if raw else config.data.prompt_template, text)
        tokens = encode_prompt(example, self._parts.tokenizer, None if raw else self._parts.chat)
        params = SamplingParams(
            max_tokens=max_new_tokens or config.eval_new_tokens,
            temperature=config.eval.temperature if temperature is None else temperature,
            seed=seed,
            stop_tokens=self._parts.stop_ids,
        )
        return self._driver.sample_blocking(tokens, params)


def as_example(template: str, text: str) -> Example:
    """`text` in the only field of `template`, in a template of its own where there is none to fill,
    and alone where there are several."""
    fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    if not fields:
        return Example(text, "", template=text.replace("{", "{{").replace("}", "}}"))
    if len(fields) > 1:
        return Example(text, "")
    return Example(text, "", metadata={fields[0]: text}, template=template)

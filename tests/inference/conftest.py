"""A tiny model, one warm engine for all tests, and one-at-a-time references to compare with."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import ModelConfig
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.inference.engine import Engine
from jaxrl.inference.sampling import sample_tokens, seed_words
from jaxrl.models.model import (
    build_model,
    forward,
    init_cache,
    sequence_logprobs,
    unembed,
)
from jaxrl.types import SamplingParams, WeightVersion
from jaxrl.weights.digest import stamp

LENGTH = 48
VOCAB = 40


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Model, engine and several versions of its weights, with references that use no engine."""

    model: object
    engine: Engine
    params: dict[int, dict]
    versions: dict[int, WeightVersion]

    def weights(self, version: int) -> dict:
        """The weights of a version."""
        return self.params[version]

    @functools.cached_property
    def _next(self):
        """(params, tokens [1, LENGTH], last index) -> logits [1, V], by a full forward."""
        positions = np.arange(LENGTH, dtype=np.int32)[None]

        def logits(params, tokens, last):
            hidden, _ = forward(self.model, params, tokens, positions)
            return unembed(self.model, params, hidden[:, last])

        return jax.jit(logits)

    @functools.cached_property
    def _logprobs(self):
        positions = np.arange(LENGTH, dtype=np.int32)[None]

        def logprobs(params, tokens, temperature):
            return sequence_logprobs(
                self.model, params, tokens, positions, None, temperature=temperature
            )[0]

        return jax.jit(logprobs)

    @functools.cached_property
    def _cached_step(self):
        def step(params, token, position, cache):
            hidden, cache = forward(self.model, params, token, position, None, cache)
            return unembed(self.model, params, hidden[:, 0]), cache

        return jax.jit(step)

    def naive(
        self, prompt, params: SamplingParams, version: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities, one full forward for each token."""
        sequence = list(prompt)
        tokens, logps = [], []
        for _ in range(params.max_tokens):
            logits = self._next(self.params[version], _padded(sequence), len(sequence) - 1)
            token, logp = _sample(
                logits,
                np.array([params.temperature], np.float32),
                seed_words(params.seed)[None],
                np.array([len(sequence)], np.int32),
            )
            sequence.append(int(token[0]))
            tokens.append(int(token[0]))
            logps.append(float(logp[0]))
            if tokens[-1] in params.stop_tokens:
                break
        return np.array(tokens), np.array(logps)

    def logits(self, sequence, version: int) -> np.ndarray:
        """Logits [V] after `sequence`, by a full forward under the weights of a version."""
        logits = self._next(self.params[version], _padded(sequence), len(sequence) - 1)
        return np.asarray(logits)[0]

    def logprobs(self, prompt, tokens, version: int, temperature: float = 1.0) -> np.ndarray:
        """Log-probability of each completion token under the weights of `version`."""
        sequence = [*prompt, *tokens]
        scores = self._logprobs(
            self.params[version], _padded(sequence), np.float32(temperature or 1.0)
        )
        return np.asarray(scores)[0, len(prompt) : len(sequence)]

    def mixed_cache_logprobs(self, prompt, tokens, versions, temperature: float) -> np.ndarray:
        """Log-probabilities when the token after each fed token comes from the weights `versions`
        of that next token, over the cache that earlier weights left."""
        cache = init_cache(self.model, 1, LENGTH)
        sequence = [*prompt, *tokens]
        producers = [versions[0]] * len(prompt) + list(versions[1:])
        scores = []
        for i, producer in enumerate(producers):
            logits, cache = self._cached_step(
                self.params[int(producer)],
                np.array([[sequence[i]]], np.int32),
                np.array([[i]], np.int32),
                cache,
            )
            if i >= len(prompt) - 1:
                scaled = np.asarray(logits, np.float64)[0] / (temperature or 1.0)
                norm = np.log(np.exp(scaled - scaled.max()).sum()) + scaled.max()
                scores.append(scaled[sequence[i + 1]] - norm)
        return np.array(scores)


def _opinionated(model, seed: int) -> dict:
    """Weights so large that rows differ from one another; without the cost of compiling init."""
    rng = np.random.default_rng(seed)

    def leaf(like):
        scale = 0.3 if len(like.shape) > 1 else 0.1
        values = rng.normal(0, scale, like.shape) + (len(like.shape) == 1)
        return jnp.array(values.astype(like.dtype))

    return jax.tree.map(leaf, model.abstract)


_sample = jax.jit(sample_tokens)


def _padded(sequence) -> np.ndarray:
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(sequence)] = sequence
    return tokens


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    return ModelConfig(
        n_layers=2,
        d_model=32,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        mlp_dim=64,
        vocab_size=VOCAB,
        max_length=LENGTH,
    )


@pytest.fixture(scope="session")
def tiny(tiny_config) -> Tiny:
    model = build_model(tiny_config)
    params = {number: _opinionated(model, number) for number in (0, 1, 2)}
    engine = Engine(
        model,
        slots=4,
        max_length=LENGTH,
        prefill_buckets=(8,),
        attend_buckets=(24,),
        steps_per_dispatch=4,
        prefill_rows=2,
        max_stop_tokens=2,
    )
    engine.warm_up(params[0])
    return Tiny(model, engine, params, {n: stamp(p, n) for n, p in params.items()})


@pytest.fixture
def prompts() -> list[np.ndarray]:
    """Eight prompts of different lengths: 1, around the bucket of 8, and longer."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in (1, 7, 8, 9, 15, 16, 17, 24)]


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes; no token of the tiny model ends a text, unless a test says so."""
    return dataclasses.replace(load_tokenizer("bytes"), eos_id=200, stop_ids=())

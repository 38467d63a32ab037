"""A tiny chat model with a tokenizer of bytes, one warm engine, and servers over it."""

from __future__ import annotations

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data.chat_cases import chat_of
from serving.servers import serving

from jaxrl.config import ModelConfig
from jaxrl.inference.driver import Driver
from jaxrl.inference.engine import Engine
from jaxrl.models.model import build_model
from jaxrl.types import WeightVersion
from jaxrl.weights.digest import stamp

LENGTH = 128


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Engine and weights of two versions; `chat` is its template, with the tokenizer."""

    engine: Engine
    params: dict[int, dict]
    versions: dict[int, WeightVersion]
    chat: object

    @property
    def tokenizer(self):
        """Bytes, and the special tokens of the template."""
        return self.chat.tokenizer

    def driver(self, engine=None, **options) -> Driver:
        """A driver that serves version 0; to be started."""
        options = {"tokenizer": self.tokenizer, "verify": False, **options}
        return Driver(engine or self.engine, self.params[0], self.versions[0], **options)


def _weights(model, seed: int) -> dict:
    """Weights that prefer letters, so that there is text to look at."""
    rng = np.random.default_rng(seed)

    def leaf(like):
        scale = 0.3 if len(like.shape) > 1 else 0.1
        values = rng.normal(0, scale, like.shape) + (len(like.shape) == 1)
        return jnp.array(values.astype(like.dtype))

    return jax.tree.map(leaf, model.abstract)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    chat = chat_of("smollm2")
    model = build_model(
        ModelConfig(
            n_layers=2,
            d_model=32,
            n_heads=4,
            n_kv_heads=2,
            head_dim=8,
            mlp_dim=64,
            vocab_size=chat.tokenizer.vocab_size,
            max_length=LENGTH,
        )
    )
    params = {number: _weights(model, number) for number in (0, 1)}
    engine = Engine(
        model,
        slots=4,
        max_length=LENGTH,
        prefill_buckets=(64,),
        attend_buckets=(LENGTH,),
        steps_per_dispatch=4,
        prefill_rows=2,
        top_logprobs=5,
    )
    engine.warm_up(params[0])
    return Tiny(engine, params, {n: stamp(p, n) for n, p in params.items()}, chat)


@pytest.fixture(scope="module")
def shared(tiny):
    """A server that a module's tests share; they leave it as it was."""
    with tiny.driver() as driver, serving(driver, template=tiny.chat) as server:
        yield server


class Gate:
    """The engine, held up before each dispatch until the test lets it go on."""

    def __init__(self, engine):
        self._engine = engine
        self.open = threading.Event()
        self.reached = threading.Event()
        self.error: Exception | None = None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, *args, **kwargs):
        """As the engine's."""
        self.reached.set()
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error
        return self._engine.generate(*args, **kwargs)


@pytest.fixture
def gate(tiny):
    """An engine to hold up; it is let go in the end."""
    gate = Gate(tiny.engine)
    yield gate
    gate.open.set()

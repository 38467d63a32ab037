"""The collector over the real driver: weights change while groups are being sampled."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl.config import ModelConfig
from jaxrl.inference.driver import Driver
from jaxrl.inference.engine import Engine
from jaxrl.models.model import build_model, init_params, sequence_logprobs
from jaxrl.rollout.collate import collate, rows_for
from jaxrl.rollout.single_turn import SingleTurn
from jaxrl.types import Prompt
from jaxrl.weights.digest import stamp

LONG = 120.0
MODEL = ModelConfig(
    n_layers=1,
    d_model=16,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    mlp_dim=32,
    vocab_size=32,
    max_length=32,
)


class Prompts:
    def __getitem__(self, index: int) -> Prompt:
        tokens = np.array([1 + index % 30, 2, 3], np.int32)
        return Prompt(f"train/e0/{index:05d}", index, "", tokens, {"answer": ""})


@pytest.fixture(scope="module")
def model():
    return build_model(MODEL)


@pytest.fixture(scope="module")
def weights(model):
    """Weights of versions 0, 1, 2, …, far enough apart to tell their log-probabilities apart."""
    first = init_params(model, 0)
    return [jax.tree.map(lambda leaf, i=i: leaf * (1 + 0.5 * i), first) for i in range(4)]


@pytest.fixture(scope="module")
def engine(model):
    """Compiled once: it holds no weights and no state."""
    return Engine(
        model,
        slots=8,
        max_length=16,
        prefill_buckets=(16,),
        prefill_rows=1,
        steps_per_dispatch=1,
    )


@pytest.fixture
def driver(engine, weights):
    with Driver(engine, weights[0], stamp(weights[0], 0), in_flight="finish") as driver:
        yield driver


@pytest.fixture(scope="module")
def expected_logprobs(model):
    """Function (params, tokens [12]) -> log-probabilities [12] of the full forward."""
    positions, segments = np.arange(12)[None], np.ones((1, 12), np.int32)

    @jax.jit
    def compute(params, tokens):
        return sequence_logprobs(model, params, tokens, positions, segments, chunk=12)[0][0]

    return lambda params, tokens: np.asarray(compute(params, tokens[None]))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_collected_tokens_carry_the_version_whose_weights_give_their_logprobs(
    fakes, collecting, driver, weights, expected_logprobs, max_staleness
):
    workflow = SingleTurn(fakes.ScriptedPool(), max_new_tokens=9)
    collector = collecting(
        driver,
        workflow,
        prompts=Prompts(),
        batch_size=8,
        group_size=4,
        max_staleness=max_staleness,
    )
    seen = set()

    for version in range(3):
        for group in collector.next_batch(version, 2, LONG):
            assert len({t.tokens.tobytes() for t in group.trajectories}) > 1
            for t in group.trajectories:
                (made,) = set(t.versions[t.loss_mask].tolist())
                assert version - max_staleness <= made <= version
                expected = expected_logprobs(weights[made], t.tokens)
                np.testing.assert_allclose(
                    t.logprobs[t.loss_mask], expected[t.loss_mask], rtol=0, atol=1e-4
                )
                seen.add(made)
        driver.set_weights(weights[version + 1], stamp(weights[version + 1], version + 1))
        collector.set_version(version + 1)

    assert len(seen) >= (3 if max_staleness == 0 else 2)


def test_collected_groups_of_the_driver_collate_into_a_batch(fakes, collecting, driver):
    workflow = SingleTurn(fakes.ScriptedPool(), max_new_tokens=9)
    collector = collecting(driver, workflow, prompts=Prompts(), batch_size=8, group_size=4)

    groups = collector.next_batch(0, 2, LONG)
    batch = collate(groups, rows=rows_for(8, 12, 24, data_axes=4), row_length=24)

    assert batch.tokens.shape == (4, 24)
    assert batch.loss_weights.sum() == pytest.approx(1.0, abs=1e-6)
    assert jax.tree.all(jax.tree.map(lambda a: np.isfinite(a).all(), batch.arrays()))


def test_closing_the_collector_frees_the_slots_of_the_driver(fakes, collecting, driver):
    workflow = SingleTurn(fakes.ScriptedPool(), max_new_tokens=12)
    collector = collecting(driver, workflow, prompts=Prompts(), batch_size=64, group_size=4)

    collector.close()

    sampled = driver.sample_blocking(np.array([5, 6], np.int32), workflow._params, timeout=LONG)
    assert len(sampled.tokens) == 12
    assert driver.stats().waiting == 0

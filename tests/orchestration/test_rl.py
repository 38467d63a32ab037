"""The RL trainer: equal to the plain loop, provable from disk, resumable, orderly when stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import signal

import jax
import numpy as np
import pytest
from orchestration.interrupting import fit_until_interrupted
from orchestration_rewards import share

from jaxrl.errors import CheckpointError, NonFiniteError, OutputError, RewardError
from jaxrl.models.model import sequence_logprobs
from jaxrl.observe.writers import read_metrics
from jaxrl.orchestration.interrupts import Interrupted
from jaxrl.orchestration.ledger import consumed_samples, published_versions, read_ledger
from jaxrl.orchestration.rl import RLTrainer
from jaxrl.orchestration.run_dir import RunDir
from jaxrl.orchestration.samplers import make_driver
from jaxrl.orchestration.session import Parts
from jaxrl.orchestration.sft import SFTTrainer
from jaxrl.rollout.collate import collate, rows_for
from jaxrl.rollout.workflow import TrajectoryBuilder, derive_seed, sample_id_of
from jaxrl.train.checkpoint import CheckpointStore
from jaxrl.train.engine import TrainEngine
from jaxrl.train.objectives import grpo_objective
from jaxrl.train.optimizer import make_optimizer
from jaxrl.types import SamplingParams, TrajectoryGroup
from jaxrl.weights.exchange import publish
from jaxrl.weights.store import WeightStore


def one_device():
    """A single device: eight of them on two cores make every step slower and prove nothing here."""
    return jax.devices()[:1]


def fit(config, devices=None) -> str:
    """Run to the end; returns the digest of the final weights."""
    with RLTrainer(config, devices=devices or one_device()) as trainer:
        trainer.fit()
        return trainer.version.digest


async def sample_group(driver, prompt, config, stop):
    """All samples of one prompt, scored in place."""
    rollout = config.rollout

    async def one(index):
        sample_id = sample_id_of(prompt.id, index)
        seed = derive_seed(config.seed, sample_id, 0)
        params = SamplingParams(rollout.max_new_tokens, rollout.temperature, seed, (stop,))
        completion = await driver.sample(prompt.tokens, params)
        builder = TrajectoryBuilder(prompt)
        builder.add_completion(completion)
        trajectory = builder.build(share(completion, prompt.reference))
        return dataclasses.replace(trajectory, sample_id=sample_id)

    trajectories = await asyncio.gather(*(one(i) for i in range(rollout.group_size)))
    return TrajectoryGroup(prompt.id, prompt.index, tuple(trajectories))


def plain_loop(config, devices) -> str:
    """Synchronous GRPO without collector, ledger or threads of its own: sample, train, repeat."""
    plain = dataclasses.replace(config, output_dir=config.output_dir + "-plain")
    with SFTTrainer(plain, devices=devices) as sft:
        start = sft.fit().number
        params = sft.engine.params
    parts, train = Parts(config, devices), config.train
    engine = TrainEngine(
        parts.model,
        params,
        make_optimizer(train),
        grpo_objective(config.algorithm, temperature=config.rollout.temperature),
        mesh=parts.mesh,
        version=start,
    )
    copy, version = publish(engine.params, engine.version)
    driver = make_driver(parts, copy, version)
    per_update = train.batch_size // config.rollout.group_size
    rows = rows_for(
        train.batch_size, config.longest_sequence, config.row_length, data_axes=parts.row_shards
    )
    for update in range(train.steps):
        prompts = [parts.train_prompts[update * per_update + i] for i in range(per_update)]

        async def batch(prompts=prompts):
            stop = parts.tokenizer.eos_id
            return await asyncio.gather(*(sample_group(driver, p, config, stop) for p in prompts))

        groups = asyncio.run(batch())
        engine.update(collate(groups, rows=rows, row_length=config.row_length))
        copy, version = publish(engine.params, engine.version)
        driver.set_weights(copy, version)
    driver.stop()
    return version.digest


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fit_staleness_zero_equals_the_plain_synchronous_loop_bit_for_bit(make_config, count):
    config, devices = make_config(), jax.devices()[:count]

    assert fit(config, devices) == plain_loop(config, devices)


@pytest.mark.parametrize("in_flight", ["finish", pytest.param("continue", marks=pytest.mark.slow)])
def test_fit_asynchronous_every_token_is_proven_from_disk(make_config, in_flight):
    config = make_config(rollout={"max_staleness": 2, "in_flight": in_flight})

    fit(config)

    run, parts = RunDir(config.output_dir), Parts(config)
    records = read_ledger(run.ledger)
    digests = published_versions(records)
    store = WeightStore(run.weights, read_only=True)
    updates = run.updates_with_trajectories()
    assert updates == [4, 5, 6, 7]
    assert sorted(consumed_samples(records)) == updates
    checked = 0
    for update in updates:
        groups, used = run.read_trajectories(update)
        for trajectory in (t for group in groups for t in group.trajectories):
            for number in np.unique(trajectory.versions[trajectory.loss_mask]):
                assert used[number] == digests[number]
                assert update - 2 <= number <= update
                params, version = store.restore(int(number), parts.model.abstract)
                assert version.digest == digests[number]
                tokens = trajectory.tokens[None]
                logp, _ = sequence_logprobs(
                    parts.model,
                    params,
                    tokens,
                    np.arange(tokens.size)[None],
                    np.ones_like(tokens),
                    chunk=16,
                )
                where = trajectory.versions == number
                if in_flight == "finish" or (trajectory.versions[where.argmax() :] == number).all():
                    fresh = len(np.unique(trajectory.versions[trajectory.loss_mask])) == 1
                    if fresh:
                        np.testing.assert_allclose(
                            trajectory.logprobs[where],
                            np.asarray(logp)[0][where],
                            rtol=0,
                            atol=1e-4,
                        )
                        checked += int(where.sum())
    assert checked > 50


def test_fit_leaves_metrics_ledger_and_evaluations(make_config):
    config = make_config(rollout={"max_staleness": 1}, eval={"every": 2})

    with RLTrainer(config, devices=one_device()) as trainer:
        result = trainer.fit()
        again = trainer.evaluate()
        answer = trainer.sampler.generate("ab=", raw=True)

    run = RunDir(config.output_dir)
    events = [record["event"] for record in read_ledger(run.ledger)]
    assert set(result) == {"before", "after"}
    assert again.accuracy == result["after"].accuracy
    assert again.version.number == 8
    assert set(answer.versions) == {8}
    assert events[0] == "started"
    assert {"dispatched", "accepted", "consumed", "updated", "published"} <= set(events)
    # Four of the cold start, four of RL.
    assert events.count("updated") == 8
    assert {"evaluated", "checkpointed", "finished"} <= set(events)
    assert events.count("consumed") == 16
    last = read_metrics(trainer.session.metrics_path)[-1]
    assert last["step"] == 8
    assert last["rollout/staleness_max"] <= 1
    # Trainer and sampler agree on log-probabilities as far as their versions agree.
    assert last["train/logp_gap"] < 0.05


def test_fit_interrupted_then_resumed_equals_an_uninterrupted_run_bit_for_bit(make_config):
    straight = fit(make_config("straight"))
    config = make_config("stopped")
    with RLTrainer(config, devices=one_device()) as trainer:
        fit_until_interrupted(trainer, updates=2)

    resumed = fit(config)

    records = read_ledger(RunDir(config.output_dir).ledger)
    assert [r["version"] for r in records if r["event"] == "resumed"] == [6]
    assert len(consumed_samples(records)) == 4
    assert resumed == straight


@pytest.mark.slow
def test_fit_interrupted_in_the_cold_start_resumes_bit_for_bit(make_config):
    straight = fit(make_config("straight"))
    config = make_config("stopped")
    with SFTTrainer(config, devices=one_device()) as trainer:
        update = trainer._update

        def stop_after_two():
            update()
            if trainer.engine.version == 2:
                signal.raise_signal(signal.SIGTERM)

        trainer._update = stop_after_two
        with pytest.raises(Interrupted) as stopped:
            trainer.fit()

    resumed = fit(config)

    assert stopped.value.signum == signal.SIGTERM
    assert resumed == straight


def test_fit_finished_run_is_not_trained_again(make_config):
    config = make_config()
    first = fit(config)

    second = fit(config)

    records = read_ledger(RunDir(config.output_dir).ledger)
    updates = [record["update"] for record in records if record["event"] == "updated"]
    assert first == second
    assert updates == list(range(8))


@pytest.mark.parametrize(
    ("scorer", "message"), [("fails", "no such planet"), ("not_a_number", "nan")]
)
def test_fit_scorer_that_fails_stops_the_run_with_its_cause(make_config, scorer, message):
    config = make_config(rewards={"scorer": f"orchestration_rewards:{scorer}"})

    with (
        RLTrainer(config, devices=one_device()) as trainer,
        pytest.raises(RewardError, match=message),
    ):
        trainer.fit()


def test_fit_scorer_that_fails_in_training_stops_the_run_with_its_checkpoint(make_config):
    config = make_config(rewards={"scorer": "orchestration_rewards:fails_in_training"})

    with (
        RLTrainer(config, devices=one_device()) as trainer,
        pytest.raises(RewardError, match="no such moon"),
    ):
        trainer.fit()

    run = RunDir(config.output_dir)
    events = [record["event"] for record in read_ledger(run.ledger)]
    assert "evaluated" in events
    assert "consumed" not in events
    assert CheckpointStore(run.checkpoints).latest() == 4


def test_fit_scorer_that_hangs_is_counted_and_another_prompt_takes_its_place(make_config):
    config = make_config(
        rewards={"scorer": "orchestration_rewards:hangs_on_a", "timeout_s": 0.5},
        train={"steps": 1, "batch_size": 32},
        eval={"size": 1},
    )

    with RLTrainer(config, devices=one_device()) as trainer:
        trainer.fit()

    events = read_ledger(RunDir(config.output_dir).ledger)
    rejected = [r for r in events if r["event"] == "rejected"]
    assert {r["reason"] for r in rejected} == {"reward_timeout"}
    assert len(consumed_samples(events)[4]) == 32


def test_fit_second_run_in_the_same_directory_is_refused(make_config):
    config = make_config()
    with SFTTrainer(config, devices=one_device()), pytest.raises(OutputError, match="another run"):
        RLTrainer(config, devices=one_device()).fit()


def test_fit_resume_policy_that_does_not_fit_is_refused(make_config):
    config = make_config(checkpoint={"resume": "must"})

    with (
        RLTrainer(config, devices=one_device()) as trainer,
        pytest.raises(CheckpointError, match="must"),
    ):
        trainer.fit()


def test_fit_kl_to_the_start_holds_the_policy_near_it(make_config):
    free = make_config("free", train={"learning_rate": 1e-2})
    held = make_config("held", train={"learning_rate": 1e-2}, algorithm={"kl_coef": 10.0})

    fit(free), fit(held)

    def moved(config):
        store = WeightStore(RunDir(config.output_dir).weights, read_only=True)
        first, last = (store.restore(number)[0] for number in (4, 8))
        parts = jax.tree.map(lambda a, b: float(abs(a - b).sum()), first, last)
        return sum(jax.tree.leaves(parts))

    assert moved(held) < moved(free)


def test_fit_update_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(make_config):
    config = make_config(checkpoint={"every": 1, "publish_every": 0})

    with RLTrainer(config, devices=one_device()) as trainer:
        collate = trainer._collate

        def broken(groups):
            batch = collate(groups)
            if trainer.updates == 2:
                batch.loss_weights[:] = np.inf
            return batch

        trainer._collate = broken
        with pytest.raises(NonFiniteError, match="update 6"):
            trainer.fit()

    assert CheckpointStore(RunDir(config.output_dir).checkpoints).latest() == 6

"""Runs that sample in processes of their own: the same run, proven versions, what goes wrong."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from orchestration.remote_servers import batches_of, digests_of, records_of, samplers_of, until
from orchestration.test_hosts import run_job, said

from jaxrl.config import CheckpointConfig, MeshConfig
from jaxrl.errors import AuthenticationError, ConfigError, DeadlineError, WeightVersionError
from jaxrl.orchestration.rl import RLTrainer
from jaxrl.orchestration.run_dir import RunDir
from jaxrl.orchestration.sampling import ThroughStore
from jaxrl.weights.digest import stamp
from jaxrl.weights.store import WeightStore

pytestmark = pytest.mark.distributed

SMALL = {"train": {"steps": 2}, "sft": {"steps": 1}, "eval": {"size": 4}, "model": {"n_layers": 1}}


def trainer_of(config) -> RLTrainer:
    return RLTrainer(config, devices=jax.devices()[:1])


def fit(config):
    """The version that the run ends with."""
    with trainer_of(config) as trainer:
        trainer.fit()
        return trainer.version


def after_update(trainer, number, work) -> None:
    """`work()` is done at the end of the RL update of that number, counted from 1."""
    update = trainer._update

    def updated(*args):
        update(*args)
        if trainer.updates == number:
            work()

    trainer._update = updated


def assert_same_samples(config, other) -> None:
    for (groups, _), (others, _) in zip(batches_of(config), batches_of(other), strict=True):
        for group, expected in zip(groups, others, strict=True):
            for one, two in zip(group.trajectories, expected.trajectories, strict=True):
                np.testing.assert_array_equal(one.tokens, two.tokens)
                np.testing.assert_array_equal(one.versions, two.versions)
                np.testing.assert_array_equal(one.logprobs, two.logprobs)


def assert_versions_are_in_the_ledger(config) -> None:
    """Every token that was trained on has a version that the run published, and its digest."""
    published = digests_of(config)
    for groups, digests in batches_of(config):
        for group in groups:
            for trajectory in group.trajectories:
                used = set(trajectory.versions[trajectory.loss_mask].tolist())
                assert {n: digests[n] for n in used} == {n: published[n] for n in used}


def test_run_through_a_server_is_the_run_in_the_process_bit_for_bit(make_config):
    alone, config = (make_config(folder, **SMALL) for folder in ("alone", "remote"))

    expected = fit(alone)
    with samplers_of(config, 1) as (config, _):
        with trainer_of(config) as trainer:
            evaluations = trainer.fit()
            version = trainer.version
            sampled = trainer.sampler.generate("ab=", seed=3)

    assert_same_samples(config, alone)
    assert_versions_are_in_the_ledger(config)
    assert version == expected
    assert evaluations["after"].version == version
    assert set(sampled.versions.tolist()) == {version.number}


def test_server_that_is_not_there_is_an_error_that_names_it(make_config):
    config = make_config(**SMALL)

    with samplers_of(config, start=False, wait_timeout_s=1.0) as (config, (server,)):
        with pytest.raises(DeadlineError, match=rf"waited 1 s .* {server.url} has not answered"):
            fit(config)


def test_wrong_token_is_refused_before_anything_is_trained(make_config, monkeypatch):
    config = make_config(**SMALL)
    monkeypatch.setenv("JAXRL_SERVE_TOKEN", "not-the-token")

    with samplers_of(config, token="the-right-token") as (config, (server,)):
        with pytest.raises(AuthenticationError, match=f"{server.url}: the token is not the one"):
            fit(config)

    assert not [r for r in records_of(config) if r["event"] == "started"]


@pytest.mark.slow
def test_stale_run_through_two_servers_knows_the_version_of_every_token(make_config):
    config = make_config(train={"steps": 6}, checkpoint=CheckpointConfig(publish_every=0))

    with samplers_of(config, 2, max_staleness=2) as (config, servers):
        version = fit(config)

    assert version.number == 4 + 6
    assert_versions_are_in_the_ledger(config)
    # The first, the last, and those that could still be sampled from.
    assert WeightStore(RunDir(config.output_dir).weights).numbers() == [4, 8, 9, 10]
    assert all("now serving weights" in server.text for server in servers)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_server_that_is_killed_and_started_again_loses_nothing(make_config, staleness):
    alone, config = (
        make_config(folder, train={"steps": 5}, rollout={"max_staleness": staleness})
        for folder in ("alone", "remote")
    )

    expected = fit(alone)
    with samplers_of(config, 1) as (config, (server,)):
        with trainer_of(config) as trainer:
            after_update(trainer, 2, lambda: (server.kill(), server.start()))
            trainer.fit()
            version = trainer.version

    assert version.number == expected.number
    assert_versions_are_in_the_ledger(config)
    consumed = [r["prompt_index"] for r in records_of(config) if r["event"] == "consumed"]
    assert len(set(consumed)) == len(consumed) == 5 * 4
    if staleness == 0:
        assert_same_samples(config, alone)
        assert version == expected


@pytest.mark.slow
def test_server_that_stays_dead_leaves_its_work_to_the_other(make_config):
    config = make_config(train={"steps": 4})

    with samplers_of(config, 2) as (config, servers):
        with trainer_of(config) as trainer:
            after_update(trainer, 1, servers[0].kill)
            trainer.fit()

    assert_versions_are_in_the_ledger(config)
    assert [r for r in records_of(config) if r["event"] == "finished"]


@pytest.mark.slow
def test_run_without_its_last_server_ends_with_its_name_and_goes_on_later(make_config):
    config = make_config(train={"steps": 4}, checkpoint=CheckpointConfig(every=1))

    with samplers_of(config, 1, wait_timeout_s=90.0) as (config, (server,)):
        with trainer_of(config) as trainer:

            def die():
                server.kill()
                trainer._sampling.sampler._wait_s = 2.0

            after_update(trainer, 2, die)
            with pytest.raises(DeadlineError, match=rf"{server.url} has not answered"):
                trainer.fit()
        server.start()
        version = fit(config)

    assert version.number == 4 + 4
    assert_versions_are_in_the_ledger(config)


@pytest.mark.slow
def test_server_of_another_run_is_refused_with_both_digests(make_config):
    other, config = (make_config(folder, **SMALL) for folder in ("other", "run"))
    other = dataclasses.replace(other, seed=5)
    fit(other)

    with samplers_of(other, 1) as (_, (server,)):
        rollout = dataclasses.replace(config.rollout, samplers=(server.url,))
        config = dataclasses.replace(config, rollout=rollout)
        with pytest.raises(
            WeightVersionError, match=f"sampler {server.url} follows a run"
        ) as error:
            fit(config)

    assert digests_of(other)[3] in str(error.value)
    assert digests_of(config)[1] in str(error.value)


@pytest.mark.slow
def test_server_for_too_short_sequences_is_refused_with_both_lengths(make_config):
    config = make_config(**SMALL)

    with samplers_of(config, 1, "--max-length=10") as (config, (server,)):
        with pytest.raises(ConfigError, match=f"{server.url} takes sequences of 10 .* samples 12"):
            fit(config)


@pytest.mark.slow
def test_servers_follow_a_run_that_goes_back_to_its_checkpoint(make_config, monkeypatch):
    config = make_config(train={"steps": 5}, checkpoint=CheckpointConfig(every=2))

    def fail():
        raise RuntimeError("the machine of the trainer is gone")

    with samplers_of(config, 1) as (config, (server,)):
        with trainer_of(config) as trainer:
            monkeypatch.setattr(trainer, "_save_after_failure", lambda: None)
            after_update(trainer, 3, fail)
            with pytest.raises(RuntimeError, match="the trainer is gone"):
                trainer.fit()
        lost = digests_of(config)[4 + 3]
        until(lambda: f"now serving weights v7:{lost[:12]}" in server.text, "version 7")
        # Another learning rate: the versions that are made anew are other weights.
        train = dataclasses.replace(config.train, learning_rate=5e-4)
        config = dataclasses.replace(config, train=train)
        version = fit(config)

    assert version.number == 4 + 5
    assert digests_of(config)[4 + 3] != lost
    assert f"the run has taken v7:{lost[:12]} back" in server.text
    assert_versions_are_in_the_ledger(config)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{"lora_rank": 2}, {"dtype": "bfloat16"}], ids=str)
def test_adapters_and_narrow_weights_are_sampled_from_as_in_the_process(make_config, model):
    changes = {**SMALL, "model": {"n_layers": 1, **model}}
    alone, config = (make_config(folder, **changes) for folder in ("alone", "remote"))

    expected = fit(alone)
    with samplers_of(config, 1) as (config, _):
        version = fit(config)

    assert_same_samples(config, alone)
    assert version == expected


def test_version_that_a_server_reads_is_not_deleted(make_config, tmp_path):
    store, params = WeightStore(tmp_path / "weights"), {"w": np.ones(4, np.float32)}
    for number in range(9):
        store.publish(params, stamp(params, number))
    sampling = object.__new__(ThroughStore)
    sampling._session = SimpleNamespace(store=store, config=make_config())
    sampling.sampler = SimpleNamespace(loading=lambda: {5})

    sampling.tidy(lambda number: number % 3 == 0)

    assert store.numbers() == [0, 3, 5, 6, 7, 8]


@pytest.mark.slow
def test_two_trainer_processes_share_a_server(tmp_path, make_config):
    changes = {"mesh": MeshConfig(data=2, fsdp=-1), "train": {"steps": 3}, "eval": {"size": 7}}
    alone, config = (make_config(folder, **changes) for folder in ("alone", "remote"))

    with RLTrainer(alone, devices=jax.devices()[:2]) as trainer:
        expected = trainer.fit()["after"].metrics()
    # The server has a device of its own, and not the mesh of the trainer.
    flags = ("--config.mesh.data=1", "--config.mesh.fsdp=1")
    with samplers_of(config, 1, *flags, wait_timeout_s=120.0) as (config, _):
        results = said(run_job(tmp_path, config, "rl", 2, 1))

    assert len({each["version"] for each in results}) == 1
    assert all(each["evaluation"] == expected for each in results)
    assert_versions_are_in_the_ledger(config)
    consumed = [r["prompt_index"] for r in records_of(config) if r["event"] == "consumed"]
    assert consumed == list(range(3 * 4))

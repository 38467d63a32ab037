"""What a run finds in its directory: versions of a killed run, missing files, a finished run."""

from __future__ import annotations

import json
import shutil

import jax
import pytest

from jaxrl import RLTrainer
from jaxrl.config import load_config
from jaxrl.errors import CheckpointError
from jaxrl.orchestration.ledger import consumed_samples, read_ledger
from jaxrl.orchestration.run_dir import RunDir
from jaxrl.orchestration.session import Parts
from jaxrl.rollout.workflow import TrajectoryBuilder
from jaxrl.types import SamplingParams
from jaxrl.weights.digest import compute_digest
from jaxrl.weights.store import WeightStore


def _fit(config, **options):
    with RLTrainer(config, devices=jax.devices()[:1], **options) as trainer:
        trainer.fit()
        return trainer.version


def test_fit_after_a_kill_makes_the_versions_after_the_checkpoint_anew(make_config):
    config = make_config(checkpoint={"every": 2, "publish_every": 1})
    _fit(config)
    run = RunDir(config.output_dir)
    before = {v.number: v.digest for v in WeightStore(run.weights, read_only=True).versions()}
    # As after a kill: the last checkpoint is that of version 6, but 7 and 8 were published.
    shutil.rmtree(run.checkpoints / "8")

    version = _fit(
        make_config(checkpoint={"every": 2, "publish_every": 1}, train={"learning_rate": 1e-2})
    )

    after = {v.number: v.digest for v in WeightStore(run.weights, read_only=True).versions()}
    assert list(after) == [4, 5, 6, 7, 8]
    assert [before[n] == after[n] for n in after] == [True, True, True, False, False]
    assert after[8] == version.digest
    consumed = consumed_samples(read_ledger(run.ledger))
    assert {update: len(ids) for update, ids in consumed.items()} == dict.fromkeys(range(4, 8), 16)


def test_fit_without_the_checkpoints_that_the_ledger_names_is_refused(make_config):
    config = make_config()
    _fit(config)
    run = RunDir(config.output_dir)
    shutil.rmtree(run.checkpoints)
    lines = run.ledger.read_text()

    with pytest.raises(CheckpointError, match="says that checkpoint 8 was written, but .* none"):
        _fit(config)

    assert run.ledger.read_text() == lines


def test_fit_damaged_checkpoint_is_refused_with_the_way_to_an_earlier_one(make_config):
    _fit(make_config(checkpoint={"every": 2}))
    run = RunDir(make_config().output_dir)
    data = max((run.checkpoints / "8").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    data.write_bytes(data.read_bytes()[:20])
    more = make_config(train={"steps": 5})

    with pytest.raises(CheckpointError, match=r"delete .*/8 to go on from checkpoint 6"):
        _fit(more)
    shutil.rmtree(run.checkpoints / "8")

    assert _fit(more).number == 9


def test_fit_finished_run_says_so_and_keeps_its_config(make_config, capsys):
    config = make_config()
    _fit(config)

    _fit(make_config(train={"learning_rate": 0.5}))

    assert "is finished, nothing is trained" in capsys.readouterr().err
    assert load_config(RunDir(config.output_dir).config) == config


def test_fit_with_another_config_says_what_changes(make_config, capsys):
    _fit(make_config())

    _fit(make_config(train={"steps": 5, "learning_rate": 0.5}))

    words = "the config of this run changes: train.steps: 4 -> 5; train.learning_rate: 0.001 -> 0.5"
    assert words in capsys.readouterr().err


class _TwoTurns:
    """Asks twice for the longest completion: more tokens than a single turn of the config has."""

    async def run(self, sampler, prompt):
        episode = TrajectoryBuilder(prompt)
        for _ in range(2):
            answer = await sampler.sample(episode.tokens, SamplingParams(max_tokens=4))
            episode.add_completion(answer)
            episode.add_tokens([5, 6])
        return episode.build(reward=float(sum(episode.tokens) % 3))


def test_fit_episodes_of_several_turns_may_fill_the_context(make_config):
    config = make_config(sft={"steps": 0}, train={"steps": 2}, data={"max_prompt_tokens": 4})

    _fit(config, workflow=_TwoTurns())

    groups, _ = RunDir(config.output_dir).read_trajectories(1)
    lengths = {len(t.tokens) for group in groups for t in group.trajectories}
    assert lengths == {15}
    assert json.loads(RunDir(config.output_dir).ledger.read_text().splitlines()[-1])["event"] == (
        "finished"
    )


def test_fit_without_a_cold_start_saves_no_state_before_rl_and_goes_on(make_config):
    config = make_config(sft={"steps": 0}, train={"steps": 2})
    initial = compute_digest(Parts(config, jax.devices()[:1]).initial_params())

    _fit(config)
    _fit(make_config(sft={"steps": 0}, train={"steps": 3}))

    records = read_ledger(RunDir(config.output_dir).ledger)
    found = [r for r in records if r["event"] in ("started", "checkpointed", "resumed")]
    assert [(r["event"], r["version"]) for r in found] == [
        ("started", 0),
        ("checkpointed", 2),
        ("resumed", 2),
        ("checkpointed", 3),
    ]
    published = [r for r in records if r["event"] == "published"]
    assert published[0]["digest"] == initial
    assert [len(ids) for ids in consumed_samples(records).values()] == [16, 16, 16]


def test_fit_with_another_seed_is_refused_and_keeps_the_config(make_config):
    config = make_config(sft={"steps": 1}, train={"steps": 0})
    _fit(config)
    before = RunDir(config.output_dir).config.read_bytes()

    with pytest.raises(CheckpointError, match="was made with seed=0, the config has seed=5"):
        _fit(make_config(sft={"steps": 1}, train={"steps": 1}, seed=5))
    assert RunDir(config.output_dir).config.read_bytes() == before

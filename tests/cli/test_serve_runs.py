"""`jaxrl serve` and the weight versions of a run: its store, and following it while it trains."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time

import numpy as np
import pytest
from cli.serve_cases import MODEL, arguments

from jaxrl.cli import served
from jaxrl.config import DataConfig, ExperimentConfig, RolloutConfig, TrainConfig
from jaxrl.config.serialize import save_config
from jaxrl.errors import ConfigError
from jaxrl.models.model import build_model, init_params
from jaxrl.orchestration.run_dir import RunDir
from jaxrl.serving.backend import Backend
from jaxrl.types import SamplingParams
from jaxrl.weights.digest import stamp
from jaxrl.weights.store import WeightStore


@pytest.fixture
def run_folder(tmp_path):
    """(folder of a run with version 0, function that publishes another)."""
    config = ExperimentConfig(
        output_dir=str(tmp_path / "run"),
        model=MODEL,
        data=DataConfig(source="jsonl", path="none", tokenizer="bytes", max_prompt_tokens=16),
        train=TrainConfig(steps=3),
        rollout=RolloutConfig(max_new_tokens=8, slots=8),
    )
    folder = RunDir(config.output_dir)
    folder.weights.mkdir(parents=True)
    save_config(config, folder.config)
    built, store = build_model(MODEL), WeightStore(folder.weights)

    def publish(number, seed):
        params = init_params(built, seed)
        version = stamp(params, number)
        store.publish(params, version)
        return version

    publish(0, 0)
    return folder.path, publish


@pytest.mark.parametrize("first", [0, 300])
def test_store_of_a_run_stands_for_the_run(run_folder, first):
    folder, _ = run_folder
    # After a cold start, the first version that is published is a later one.
    (folder / "weights" / "0").rename(folder / "weights" / str(first))

    by_store = arguments(f"--weights={folder / 'weights'}", f"--version={first}")
    by_run = arguments(f"--run={folder}", f"--version={first}")

    assert by_store == by_run


def test_run_given_as_weights_is_refused_with_the_flag_for_runs(run_folder):
    folder, _ = run_folder

    with pytest.raises(ConfigError, match=f"{folder} is a run: use --run={folder}"):
        arguments(f"--weights={folder}")


def test_store_without_its_run_is_refused(run_folder, tmp_path):
    folder, _ = run_folder
    shutil.copytree(folder / "weights", tmp_path / "weights")

    with pytest.raises(ConfigError, match=f"versions of a run, but {tmp_path} is no run"):
        arguments(f"--weights={tmp_path / 'weights'}")


def _follow(folder, programs):
    return arguments(
        f"--run={folder}",
        "--follow",
        "--config.rollout.prefill_buckets=24",
        f"--config.observe.compilation_cache={programs}",
    )


def test_follower_serves_each_new_version_of_the_run(run_folder, programs):
    folder, publish = run_folder
    args = _follow(folder, programs)
    loaded = served.load_served(args)
    backend = Backend("run")
    backend.open(loaded.driver)

    with loaded.driver as driver:
        follower = served.Follower(args, loaded.parts, backend, poll_s=0.02)
        first = publish(3, 3)
        _until(lambda: driver.version == first)
        (folder / "weights" / "4").mkdir()  # what a publisher leaves while it writes
        second = publish(5, 5)
        _until(lambda: driver.version == second)
        follower.stop()
        publish(6, 6)
        time.sleep(0.2)
        last = driver.version

    assert backend.version(3) == first
    assert backend.version(5) == second
    assert last == second


def test_run_that_has_published_nothing_is_waited_for_when_it_is_followed(
    run_folder, programs, monkeypatch
):
    folder, publish = run_folder
    shutil.rmtree(folder / "weights" / "0")
    monkeypatch.setattr(served.time, "sleep", lambda _: publish(300, 1))

    loaded = served.load_served(_follow(folder, programs))
    loaded.driver.stop()

    assert loaded.driver.version.number == 300


def test_flags_that_do_not_fit_a_followed_run_are_refused_before_its_first_version(
    run_folder, programs, monkeypatch
):
    folder, _ = run_folder
    shutil.rmtree(folder / "weights" / "0")
    monkeypatch.setattr(served.time, "sleep", lambda _: pytest.fail("it waits for weights"))
    args = _follow(folder, programs)
    options = dataclasses.replace(args.options, max_length=65)

    with pytest.raises(ConfigError, match="--max-length=65 must be at most 64"):
        served.load_served(dataclasses.replace(args, options=options))


def _no_room(*_):
    raise RuntimeError("no room on the device")


@pytest.fixture
def log(caplog):
    """What jaxrl logs, wherever a command sends it."""
    logger = logging.getLogger("jaxrl")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_follower_reports_what_goes_wrong_once_and_goes_on(run_folder, programs, log, monkeypatch):
    folder, publish = run_folder
    args = _follow(folder, programs)
    loaded = served.load_served(args)
    backend = Backend("run")
    backend.open(loaded.driver)

    with loaded.driver as driver:
        version = publish(1, 1)
        stamp_file = folder / "weights" / "1" / "stamp" / "metadata"
        stamp_file.write_text(stamp_file.read_text().replace(version.digest, "0" * 64))
        follower = served.Follower(args, loaded.parts, backend, poll_s=0.02)
        _until(lambda: "cannot follow the run" in log.text)
        time.sleep(0.2)
        with monkeypatch.context() as patch:
            patch.setattr(driver, "set_weights", _no_room)
            publish(2, 2)
            _until(lambda: "no room on the device" in log.text)
        good = publish(3, 3)
        _until(lambda: driver.version == good)
        follower.stop()

    assert log.text.count("cannot follow the run") == 2


@pytest.mark.parametrize("later", [[], [7]])
def test_follower_serves_what_a_run_that_went_back_made_anew(run_folder, programs, log, later):
    folder, publish = run_folder
    publish(6, 1)
    args = _follow(folder, programs)
    loaded = served.load_served(args)
    backend, replaced = Backend("run", follows=True), []
    backend.open(loaded.driver)
    store = WeightStore(folder / "weights")
    prompt, params = np.array([65, 66]), SamplingParams(8, temperature=0)
    before = loaded.driver.sample_blocking(prompt, params)

    follower = served.Follower(args, loaded.parts, backend, on_driver=replaced.append)
    store.discard_after(5)
    again = [publish(number, number + 5) for number in (6, *later)][-1]
    follower.look()
    _until(lambda: backend.state == "ready" and backend.driver.version == again)
    after = backend.driver.sample_blocking(prompt, params)
    follower.stop()
    backend.driver.stop()

    # Also for a prompt whose beginning was kept: the old weights had the same number.
    expected = loaded_again(args, prompt, params)
    np.testing.assert_array_equal(after.logprobs, expected.logprobs)
    assert not np.array_equal(before.logprobs, after.logprobs)
    assert backend.version(again.number) == again
    assert replaced == ([] if later else [backend.driver])
    # There is no room for two caches.
    assert later or loaded.driver._batcher._state is None


def loaded_again(args, prompt, params):
    """The completion of a server that starts now."""
    with served.load_served(args).driver as driver:
        return driver.sample_blocking(prompt, params)


def test_follower_goes_back_when_its_version_is_taken_away(run_folder, programs):
    folder, publish = run_folder
    publish(6, 1)
    args = _follow(folder, programs)
    loaded = served.load_served(args)
    backend = Backend("run", follows=True)
    backend.open(loaded.driver)
    waiting = loaded.driver.submit(np.array([65, 66]), SamplingParams(60, seed=1))

    follower = served.Follower(args, loaded.parts, backend, poll_s=0.02)
    WeightStore(folder / "weights").discard_after(5)
    _until(lambda: backend.state == "ready" and backend.driver.version.number == 0)
    later = publish(1, 4)
    _until(lambda: backend.driver.version == later)
    follower.stop()
    backend.driver.stop()

    assert waiting.done()
    assert backend.version(6).digest == ""


def test_follower_that_is_asked_looks_at_once(run_folder, programs):
    folder, publish = run_folder
    args = _follow(folder, programs)
    loaded = served.load_served(args)
    backend = Backend("run", follows=True)
    backend.open(loaded.driver)

    with loaded.driver as driver:
        follower = served.Follower(args, loaded.parts, backend, poll_s=1e6)
        version = publish(1, 1)
        ticket = follower.look()
        _until(lambda: driver.version == version)
        follower.stop()

    assert follower.newest(ticket) == version
    assert follower.newest(ticket + 1) is None


def _until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)

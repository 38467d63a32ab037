"""config.json: written, read back exactly, and refused with a reason."""

from __future__ import annotations

import json

import pytest

from jaxrl.config import (
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
    from_json,
    load_config,
    save_config,
    to_json,
)
from jaxrl.errors import ConfigError, OutputError


@pytest.fixture
def config() -> ExperimentConfig:
    """A config with every kind of value in it."""
    return ExperimentConfig(
        model=ModelConfig(norm_eps=1e-7, qk_norm=True),
        data=DataConfig(
            source="reasoning_gym",
            task="spell_backward",
            task_options={"words": ["é", "b"], "deep": {"x": None, "y": 0.1, "z": True}},
        ),
        train=TrainConfig(learning_rate=0.1 + 0.2),
        rollout=RolloutConfig(prefill_buckets=(16, 128)),
    )


def edited(config: ExperimentConfig, edit) -> str:
    """Text of the config's file after `edit(record)`."""
    record = json.loads(to_json(config))
    edit(record)
    return json.dumps(record)


def test_json_round_trip_gives_an_equal_config(config):
    text = to_json(config)

    again = from_json(text)

    assert again == config
    assert again.rollout.prefill_buckets == (16, 128)
    assert again.train.learning_rate == 0.30000000000000004
    assert to_json(again) == text
    assert json.loads(text)["format"] == 1


def test_from_json_field_that_is_missing_takes_its_default(config):
    text = edited(config, lambda record: record["config"]["train"].pop("grad_clip"))

    assert from_json(text).train.grad_clip == 1.0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda r: r["config"]["train"].update(lerning_rate=1),
            "train.lerning_rate does not exist; did you mean train.learning_rate?",
        ),
        (lambda r: r["config"].update(trian={}), "trian does not exist; did you mean train?"),
        (lambda r: r["config"]["data"].pop("source"), "data.source is required"),
        (lambda r: r["config"].pop("model"), "model is required"),
        (lambda r: r["config"].update(train=3), "train=3 must be a mapping"),
        (lambda r: r.update(config=[]), "config=[] must be a mapping"),
        (lambda r: r["config"]["train"].update(steps=1.5), "train.steps=1.5 must be an integer"),
        (lambda r: r["config"]["train"].update(batch_size=9), "train.batch_size=9 must be a mult"),
        (lambda r: r.update(format=2), "format=2 must be at most 1"),
        (lambda r: r.update(format="1"), "format='1' must be"),
        (lambda r: r.pop("format"), 'exactly the keys "format" and "config"'),
    ],
)
def test_from_json_bad_record_message_names_the_field(config, edit, message):
    with pytest.raises(ConfigError) as error:
        from_json(edited(config, edit))

    assert message in str(error.value)


def test_save_and_load_file_round_trips(config, tmp_path):
    save_config(config, tmp_path / "config.json")

    assert load_config(tmp_path / "config.json") == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_load_config_message_names_the_file(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read: No such file"):
        load_config(path)

    path.write_text("{oops")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON: .* line 1 column 2"):
        load_config(path)

    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"config\.json: is not UTF-8 text"):
        load_config(path)

    path.write_text('{"format": 1, "config": {"modl": 1}}')
    with pytest.raises(ConfigError, match=r"config\.json: modl does not exist; did you mean model"):
        load_config(path)


def test_save_config_folder_missing_message_names_the_file(config, tmp_path):
    with pytest.raises(OutputError, match=r"none/config\.json: cannot be written: No such file"):
        save_config(config, tmp_path / "none" / "config.json")

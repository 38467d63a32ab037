"""config.json files that are damaged or lie: one error that names value and rule, at once."""

from __future__ import annotations

import json
import os

import pytest

from jaxrl.config import ModelConfig, published_model
from jaxrl.config.published import published_record
from jaxrl.config.serialize import from_json
from jaxrl.errors import ConfigError

GEMMA = {
    "activation": "gelu", "norm_offset": True, "post_norms": True, "scale_embedding": True,
    "qk_norm": True, "sliding_window": 4, "global_every": 2, "local_rope_theta": 1e4,
}  # fmt: skip
MIXTRAL = {"n_experts": 4, "sliding_window": 4}
FULL, WINDOW = "full_attention", "sliding_attention"
HUGE = 10**400


@pytest.fixture
def write(tmp_path):
    """Function (fields of the model, changes to its config.json) -> folder."""

    def make(fields, **changes):
        record = published_record(ModelConfig(vocab_size=99, **fields))
        (tmp_path / "config.json").write_text(json.dumps({**record, **changes}))
        return tmp_path

    return make


def _llama3(low, high):
    return {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": 64,
    }


def _yarn(**changes):
    return {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({}, {"num_hidden_layers": 10**9}, "n_layers=1000000000 must be between 1 and 1000"),
        ({}, {"num_hidden_layers": HUGE}, "must be an integer of at most 64 bits"),
        ({}, {"rope_theta": HUGE}, "rope_theta=1000.* must be a finite number"),
        ({}, {"rms_norm_eps": HUGE}, "norm_eps=1000.* must be a finite number"),
        ({}, {"rope_scaling": {"rope_type": "linear", "factor": HUGE}}, "finite numbers"),
        ({}, {"rope_scaling": _llama3(4, 4)}, "with low_freq_factor below high_freq_factor"),
        ({}, {"rope_scaling": _llama3(4, 1)}, "with low_freq_factor below high_freq_factor"),
        ({}, {"rope_scaling": _yarn(), "rope_theta": 1}, "rope_theta=1.0 must be above 1"),
        ({}, {"rope_scaling": _yarn(beta_fast=1, beta_slow=2)}, "beta_fast .* at least beta_slow"),
        ({}, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be 1.0"),
        ({}, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "=0.5 must be 1.0"),
        ({}, {"layer_types": [WINDOW] * 4}, "without 'sliding_attention', because the model has"),
        (MIXTRAL, {"sliding_window": 1.5}, "sliding_window=1.5 must be a whole number"),
        (MIXTRAL, {"sliding_window": float("nan")}, "sliding_window=nan must be a whole number"),
        (MIXTRAL, {"sliding_window": float("inf")}, "sliding_window=inf must be a whole number"),
        (MIXTRAL, {"sliding_window": HUGE}, "sliding_window=1000.* must be a finite number"),
        (MIXTRAL, {"sliding_window": 2**31}, "between 0 and 2147483647"),
        (GEMMA, {"layer_types": [FULL]}, "layer_types has 1 entries, .* num_hidden_layers=4"),
        (GEMMA, {"layer_types": [WINDOW] * 5}, "layer_types has 5 entries"),
        (GEMMA, {"layer_types": 5}, "layer_types=5 must hold"),
        (GEMMA, {"sliding_window": None}, "the model has no sliding window"),
        (GEMMA, {"layer_types": None, "sliding_window_pattern": 1.5}, "=1.5 must be a whole"),
        (GEMMA, {"layer_types": None, "sliding_window_pattern": -1}, "=-1 must be at least 0"),
        (GEMMA, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be above 0"),
    ],
)
def test_published_model_impossible_value_is_named_with_its_rule(write, fields, changes, message):
    with pytest.raises(ConfigError, match=message):
        published_model(write(fields, **changes))


def test_published_model_pattern_of_one_has_no_windows(write):
    folder = write(GEMMA, layer_types=None, sliding_window_pattern=1)

    config = published_model(folder)

    assert (config.sliding_window, config.global_every) == (0, 0)


@pytest.mark.parametrize("text", ['{"a":' * 100_000, "[" * 100_000])
def test_json_nested_without_end_is_an_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError, match="not JSON: maximum recursion depth"):
        published_model(tmp_path)
    with pytest.raises(ConfigError, match="not JSON: maximum recursion depth"):
        from_json(text)


def test_published_model_pipe_in_place_of_the_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")

    with pytest.raises(ConfigError, match=r"config\.json: must be a file"):
        published_model(tmp_path)

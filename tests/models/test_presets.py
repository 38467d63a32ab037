"""Presets have exactly the parameters of the published models."""

from __future__ import annotations

import pytest

from jaxrl.config import PRESETS, preset
from jaxrl.config.published import family_of
from jaxrl.errors import ConfigError
from jaxrl.models.model import build_model

PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
}
"""As published with the models (a tied embedding counted once)."""


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_published_number_of_parameters(name):
    model = build_model(preset(name, scan_layers=True))

    assert model.n_params == PARAMETERS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_of_the_family_of_its_name(name):
    family = {"smollm2": "llama", "qwen2.5": "qwen2", "gemma": name[:7].replace("-", "")}
    moe = "_moe" if "-a" in name else ""
    gemma3 = "_text" if "gemma-3" in name else ""

    found = family_of(preset(name)).model_type

    start = name.split("-")[0]
    assert found == family.get(start, start) + moe + gemma3


def test_preset_changes_single_fields():
    config = preset("qwen3-0.6b", max_length=512, dtype="bfloat16")

    assert (config.max_length, config.dtype, config.d_model) == (512, "bfloat16", 1024)


def test_preset_unknown_name_says_what_there_is():
    with pytest.raises(ConfigError, match="no preset 'qwen3-0.6'; did you mean qwen3-0.6b"):
        preset("qwen3-0.6")
    with pytest.raises(ConfigError, match="no preset 'gpt'; there are smollm2-135m, "):
        preset("gpt")

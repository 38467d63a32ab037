"""The configuration of a run: dataclasses, validation, files, overrides. Costs no jax import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.config.experiment import ExperimentConfig
    from jaxrl.config.files import load_config_file
    from jaxrl.config.meshes import MeshConfig, SamplerMeshConfig
    from jaxrl.config.overrides import apply_overrides
    from jaxrl.config.presets import PRESETS, preset
    from jaxrl.config.published import published_model
    from jaxrl.config.sections import (
        AlgorithmConfig,
        CheckpointConfig,
        DataConfig,
        EvalConfig,
        ModelConfig,
        ObserveConfig,
        RewardConfig,
        RolloutConfig,
        SFTConfig,
        TrainConfig,
    )
    from jaxrl.config.serialize import from_json, load_config, save_config, to_json

_HOME = {
    "ExperimentConfig": "experiment",
    "AlgorithmConfig": "sections",
    "CheckpointConfig": "sections",
    "DataConfig": "sections",
    "EvalConfig": "sections",
    "MeshConfig": "meshes",
    "SamplerMeshConfig": "meshes",
    "ModelConfig": "sections",
    "ObserveConfig": "sections",
    "RewardConfig": "sections",
    "RolloutConfig": "sections",
    "SFTConfig": "sections",
    "TrainConfig": "sections",
    "load_config_file": "files",
    "apply_overrides": "overrides",
    "PRESETS": "presets",
    "preset": "presets",
    "published_model": "published",
    "from_json": "serialize",
    "load_config": "serialize",
    "save_config": "serialize",
    "to_json": "serialize",
}

__all__ = [
    "PRESETS",
    "AlgorithmConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "ExperimentConfig",
    "MeshConfig",
    "ModelConfig",
    "ObserveConfig",
    "RewardConfig",
    "RolloutConfig",
    "SFTConfig",
    "SamplerMeshConfig",
    "TrainConfig",
    "apply_overrides",
    "from_json",
    "load_config",
    "load_config_file",
    "preset",
    "published_model",
    "save_config",
    "to_json",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # later look-ups do not come here again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

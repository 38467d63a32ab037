"""Meshes, logical-axis rules and placement of trees, for any JAX project.

Importing this package loads nothing: each name is imported on first use, so that it costs jax
alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.sharding.mesh import AXES, make_mesh, process_meshes
    from jaxrl.sharding.placement import copy_to_processes, place, reshard, shardings_of
    from jaxrl.sharding.report import bytes_per_device, describe
    from jaxrl.sharding.rules import DEFAULT_RULES, Rules

_HOME = {
    "AXES": "mesh",
    "make_mesh": "mesh",
    "process_meshes": "mesh",
    "DEFAULT_RULES": "rules",
    "Rules": "rules",
    "copy_to_processes": "placement",
    "place": "placement",
    "reshard": "placement",
    "shardings_of": "placement",
    "bytes_per_device": "report",
    "describe": "report",
}

__all__ = [
    "AXES",
    "DEFAULT_RULES",
    "Rules",
    "bytes_per_device",
    "copy_to_processes",
    "describe",
    "make_mesh",
    "place",
    "process_meshes",
    "reshard",
    "shardings_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # later look-ups do not come here again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

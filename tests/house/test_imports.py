"""The package keeps to its floors: a room imports lower floors only (docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl

PACKAGE = Path(__file__).resolve().parents[2] / "jaxrl"

FLOORS = {
    "types": 0,
    "errors": 0,
    "sharding": 0,
    "config": 1,
    "observe": 1,
    "algorithms": 1,
    "models": 2,
    "distributed": 2,
    "data": 2,
    "rewards": 2,
    "launch": 2,
    "weights": 3,
    "train": 4,
    "inference": 4,
    "rollout": 5,
    "serving": 5,
    "planning": 6,
    "orchestration": 6,
    "cli": 7,
    "__main__": 8,
    "__init__": 9,
}
"""Room -> floor. A room may import itself and every lower floor, less what NARROW says."""

NARROW = {
    "types": set(),
    "errors": set(),
    "sharding": set(),
    "config": {"errors"},
    "algorithms": {"types", "errors"},
    "launch": {"config", "errors"},
}
"""Rooms that must stay usable alone: all that they may import of jaxrl."""


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _jaxrl_imports(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, room) of every import of a jaxrl room, also those inside functions."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "jaxrl" and len(parts) > 1 and parts[1] != "__version__":
                found.append((node.lineno, parts[1]))
    return found


def _relative_imports(tree: ast.AST) -> list[int]:
    """Lines of imports that do not say which room they mean."""
    return [n.lineno for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]


def _violations(room: str, imported: str) -> str | None:
    """Why `room` may not import `imported`, or None."""
    if room == imported:
        return None
    if imported not in FLOORS:
        return f"{imported} has no floor"
    if room in NARROW and imported not in NARROW[room]:
        return f"{room} may import only {sorted(NARROW[room]) or 'nothing of jaxrl'}"
    lower = FLOORS[imported] < FLOORS[room] or (room, imported) == ("types", "errors")
    return None if lower else f"floor {FLOORS[room]} may not import floor {FLOORS[imported]}"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_of_a_room_point_to_lower_floors_only(path):
    room = _room(path)
    assert room in FLOORS, f"{room} has no floor: add it to the table of docs/architecture.md"

    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert _relative_imports(tree) == []

    bad = [
        f"{path.name}:{line} imports jaxrl.{imported}: {why}"
        for line, imported in _jaxrl_imports(tree)
        if (why := _violations(room, imported))
    ]

    assert bad == []


def test_violations_arrow_that_runs_up_is_found():
    assert _violations("models", "train") is not None
    assert _violations("train", "inference") is not None
    assert _violations("sharding", "types") is not None
    assert _violations("rollout", "inference") is None
    assert _relative_imports(ast.parse("from ..train import engine")) == [1]


def _modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_import_sharding_alone_loads_jax_and_no_other_room():
    only_jax = _modules_after("import jax, numpy")

    loaded = _modules_after("import jaxrl.sharding; jaxrl.sharding.make_mesh")

    top_level = {name.split(".")[0] for name in loaded - only_jax}
    assert top_level - set(sys.stdlib_module_names) - {"jax"} == {"jaxrl"}
    rooms = {name.split(".")[1] for name in loaded if name.startswith("jaxrl.")}
    assert rooms == {"sharding"}


def test_import_config_does_not_load_jax():
    loaded = _modules_after("from jaxrl.config import ExperimentConfig")

    assert "jax" not in loaded
    assert "flax" not in loaded


def test_import_jaxrl_loads_no_room_until_a_name_is_used():
    loaded = _modules_after("import jaxrl; dir(jaxrl)")

    assert {name for name in loaded if name.startswith("jaxrl.")} == set()
    assert "jax" not in loaded


def test_public_names_are_those_of_their_rooms():
    from jaxrl.orchestration.rl import RLTrainer

    assert jaxrl.RLTrainer is RLTrainer
    for name in jaxrl.__all__:
        assert getattr(jaxrl, name) is not None
        assert name in dir(jaxrl)
    with pytest.raises(AttributeError, match="module 'jaxrl' has no attribute 'RLTrianer'"):
        jaxrl.RLTrianer


HEAVY = ("matplotlib", "tensorboardX", "reasoning_gym", "torch", "tensorflow", "pandas")


@pytest.mark.parametrize(
    "module", ["jaxrl.orchestration.rl", "jaxrl.cli.main", "jaxrl.observe.tracker"]
)
def test_import_of_a_room_does_not_load_optional_packages(module):
    loaded = {name.split(".")[0] for name in _modules_after(f"import {module}")}

    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("module", ["jaxrl.orchestration.rl", "jaxrl.inference.driver"])
def test_import_does_not_touch_devices(module):
    code = (
        f"import {module}\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was initialised at import'"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr

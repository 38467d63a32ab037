"""Set-up that every test shares: eight CPU devices, and a report of what was skipped and why."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent

jax.config.update("jax_num_cpu_devices", 8)
# Many tests compile the same small programs; compiling is most of what the suite costs.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

pytest_plugins = ["skip_report"]


@pytest.fixture
def repo_root() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture
def read_jsonl():
    """Function path -> list of the records in a JSON-lines file."""

    def read(path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return read


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip accelerator tests where there is none, with the reason in the report."""
    for item in items:
        if item.get_closest_marker("accelerator") and jax.default_backend() == "cpu":
            item.add_marker(pytest.mark.skip(reason="needs a TPU or GPU; this machine has neither"))

"""The command in this process, with the programs that a module's tests compile kept."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jaxrl.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs: tests that ask for as many tokens compile once."""
    before = jax.config.jax_compilation_cache_dir
    yield tmp_path_factory.mktemp("cache")
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def programs():
    """The folder of compiled programs that all tests share: compiling is what a start costs."""
    return ROOT / ".pytest_cache" / "jax"


@pytest.fixture
def jaxrl(capfd, cache):
    """Function (arguments…) -> (exit code, standard output, standard error)."""

    def run(*arguments):
        capfd.readouterr()
        code = cli.main([*map(str, arguments), f"--config.observe.compilation_cache={cache}"])
        return code, *capfd.readouterr()

    return run

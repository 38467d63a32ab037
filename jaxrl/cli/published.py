"""Serves a weight version that a run left on disk; the run itself may still be going on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxrl.inference.driver import Driver
from jaxrl.models.lora import split_frozen
from jaxrl.observe.logger import setup_logging
from jaxrl.orchestration.run_dir import RunDir
from jaxrl.orchestration.samplers import make_driver
from jaxrl.orchestration.session import Parts, enable_compilation_cache
from jaxrl.types import WeightVersion
from jaxrl.weights.store import WeightStore


def load_published(args: Any) -> tuple[Parts, Any, WeightVersion]:
    """Parts of the run `args.options.run`, and its version `args.options.version` (-1: the newest),
    verified.

    Raises `CheckpointError` if the run has published no such version.
    """
    setup_logging(args.config.observe.log_level)
    enable_compilation_cache(args.config.observe.compilation_cache)
    parts = Parts(args.config)
    store = WeightStore(RunDir(args.options.run).weights, read_only=True)
    wanted = None if args.options.version < 0 else args.options.version
    frozen = split_frozen(parts.initial_params())[1] if args.config.model.lora_rank else None
    shardings = parts.model.shardings(parts.mesh)
    params, version = store.restore(wanted, parts.model.abstract, shardings, frozen=frozen)
    return parts, params, version


@contextmanager
def serve_published(args: Any) -> Iterator[tuple[Driver, Parts]]:
    """A driver for the version that `load_published` finds."""
    parts, params, version = load_published(args)
    # Whoever asks by hand may ask for more than training needed: as much as the model takes.
    driver = make_driver(parts, params, version, max_length=parts.model.config.max_length)
    try:
        yield driver, parts
    finally:
        driver.stop()

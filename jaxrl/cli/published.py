"""Weights that a run or somebody else left on disk, ready to be sampled from; nothing is written.

A run itself may still be going on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxrl.inference.driver import Driver
from jaxrl.models.lora import split_frozen
from jaxrl.models.model import unstack_layers
from jaxrl.models.narrow import narrow
from jaxrl.observe.logger import setup_logging
from jaxrl.orchestration.run_dir import RunDir
from jaxrl.orchestration.samplers import make_driver_for
from jaxrl.orchestration.session import Parts, enable_compilation_cache
from jaxrl.types import WeightVersion
from jaxrl.weights.digest import stamp
from jaxrl.weights.store import WeightStore


def open_parts(args: Any) -> Parts:
    """What can be made of `args.config` before any weight is read.

    Raises `ConfigError` if published weights and tokenizer do not belong together.
    """
    setup_logging(args.config.observe.log_level)
    enable_compilation_cache(args.config.observe.compilation_cache)
    parts = Parts(args.config)
    if getattr(args.options, "weights", ""):
        parts.check()
    return parts


def load_weights(args: Any, parts: Parts) -> tuple[Any, WeightVersion]:
    """Weights in the dtype that they are sampled in, and their version: version 0 of a published
    model, or the version `args.options.version` (-1: the newest) of a run, verified.

    Raises `CheckpointError` if there are no such weights, or if they are damaged.
    """
    if getattr(args.options, "weights", ""):
        params = parts.initial_params(parts.sampler_mesh)
        version = stamp(_by_layer(params, parts), 0)
        return narrow(params, parts.served_model.abstract), version
    store = WeightStore(RunDir(args.options.run).weights, read_only=True)
    wanted = None if args.options.version < 0 else args.options.version
    mesh, frozen = parts.sampler_mesh, None
    if args.config.model.lora_rank:
        frozen = split_frozen(parts.initial_params(mesh))[1]
    shardings = parts.model.shardings(mesh)
    params, version = store.restore(wanted, parts.model.abstract, shardings, frozen=frozen)
    return narrow(params, parts.served_model.abstract), version


def _by_layer(params: Any, parts: Parts) -> Any:
    """The weights as a model names them whose layers are not scanned.

    However the layers are computed here, the version is that of a run that begins with these
    weights. The copy lives as long as the digest takes.
    """
    return unstack_layers(params) if parts.model.config.scan_layers else params


@contextmanager
def serve(
    args: Any, parts: Parts, prompts: Sequence[np.ndarray], *, new_tokens: int
) -> Iterator[Driver]:
    """A driver that serves the weights to these prompts int [P]."""
    params, version = load_weights(args, parts)
    driver = make_driver_for(parts, params, version, prompts, new_tokens=new_tokens)
    try:
        yield driver
    finally:
        driver.stop()

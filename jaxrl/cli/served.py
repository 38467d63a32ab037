"""The model that `jaxrl serve` serves, and the versions that follow while its run trains."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxrl.cli.options import SERVED_LENGTH, ServeOptions
from jaxrl.cli.published import load_weights, open_parts
from jaxrl.errors import ConfigError, DriverError, JaxrlError
from jaxrl.inference.driver import Driver
from jaxrl.inference.engine import Engine
from jaxrl.observe.logger import get_logger
from jaxrl.orchestration.run_dir import RunDir
from jaxrl.orchestration.session import Parts
from jaxrl.serving.backend import Backend
from jaxrl.types import WeightVersion
from jaxrl.weights.store import WeightStore

TOP_LOGPROBS = 20
"""The most alternatives that a request may ask for, as OpenAI's API allows."""

POLL_S = 1.0

_LOGGER = get_logger("serving")


@dataclasses.dataclass(frozen=True)
class Served:
    """A started driver, and how its model is asked."""

    parts: Parts
    driver: Driver


def load_served(args: Any) -> Served:
    """Read the weights that the flags name and compile what serves them: takes its time.

    A run that is followed may have published nothing yet: its first version is waited for.

    Raises `ConfigError` and `CheckpointError`.
    """
    options: ServeOptions = args.options
    parts = open_parts(args)
    if options.follow:
        _wait_for_first(options.run)
    params, version = load_weights(args, parts)
    engine, kept = _engine(parts, options), options.prefix_cache_mb
    in_flight = args.config.rollout.in_flight if options.in_flight == "run" else options.in_flight
    driver = Driver(
        engine,
        params,
        version,
        in_flight=in_flight,
        tokenizer=parts.tokenizer,
        # Their digest was computed when they were read, and so it is of those that follow.
        verify=False,
        max_waiting=options.max_waiting,
        prefill_budget=options.prefill_chunk,
        prefix_cache_bytes=None if kept is None else kept << 20,
    )
    return Served(parts, driver.start())


def _wait_for_first(run: str) -> None:
    """Return once the run has a version."""
    store = WeightStore(RunDir(run).weights, read_only=True)
    if not store.numbers():
        _LOGGER.info("waiting for the first weights in %s", store.path)
    while not store.numbers():
        time.sleep(POLL_S)


def _engine(parts: Parts, options: ServeOptions) -> Engine:
    most = parts.model.config.max_length
    length = min(most, SERVED_LENGTH) if options.max_length is None else options.max_length
    if length > most:
        raise ConfigError(f"--max-length={length} must be at most {most}, the model's own")
    rollout, shards = parts.config.rollout, parts.slot_shards
    slots = rollout.slots if options.slots is None else options.slots
    return Engine(
        parts.served_model,
        slots=-(-slots // shards) * shards,
        max_length=length,
        prefill_chunk=min(options.prefill_chunk, length),
        prefill_buckets=[size for size in rollout.prefill_buckets if size <= length],
        steps_per_dispatch=rollout.steps_per_dispatch,
        max_stop_tokens=max(8, len(parts.stop_ids)),
        top_logprobs=min(TOP_LOGPROBS, parts.model.config.vocab_size),
        **prefill_rows(),
        mesh=parts.sampler_mesh,
    )


def prefill_rows() -> dict[str, int]:
    """How many prompts share a prefill call, as an option of the engine where it is not its own.

    On CPUs a call of four takes nearly four times as long as a call of one, also with empty rows,
    and requests of different lengths seldom fill it.
    """
    return {"prefill_rows": 1} if jax.default_backend() == "cpu" else {}


class Follower:
    """Serves each new version of a run as it is published, from a thread, until `stop`.

    A version that cannot be read or fitted is reported, and the present one goes on serving.
    """

    def __init__(self, args: Any, parts: Parts, backend: Backend, *, poll_s: float = POLL_S):
        self._backend, self._poll_s = backend, poll_s
        self._store = WeightStore(RunDir(args.options.run).weights, read_only=True)
        self._read: Callable[[int], tuple[Any, WeightVersion]] = lambda number: load_weights(
            _with_version(args, number), parts
        )
        self._stopped = threading.Event()
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, name="jaxrl-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look for no more versions; one that is being read is dropped when it has been."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._poll_s):
            try:
                self._look()
            except DriverError:
                return
            except (JaxrlError, ValueError, OSError) as error:
                self._complain(str(error))
            except Exception as error:
                # No room on the device for second weights, say: later there may be.
                self._complain(f"{type(error).__name__}: {error}", exc_info=True)

    def _look(self) -> None:
        newest = self._store.numbers()[-1:]
        if not newest or newest[0] <= self._backend.driver.version.number:
            return
        params, version = self._read(newest[0])
        if not self._stopped.is_set():
            self._backend.set_weights(params, version)
            self._complaint = ""
            _LOGGER.info("now serving weights %s", version)

    def _complain(self, complaint: str, *, exc_info: bool = False) -> None:
        """Once: the same thing goes wrong again at every look."""
        if complaint != self._complaint:
            self._complaint = complaint
            _LOGGER.warning("cannot follow the run, trying again: %s", complaint, exc_info=exc_info)


def _with_version(args: Any, number: int) -> Any:
    options = dataclasses.replace(args.options, version=number, follow=False)
    return dataclasses.replace(args, options=options)

"""The model that `jaxrl serve` serves, and the versions that follow while its run trains."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxrl.cli.options import SERVED_LENGTH, ServeOptions
from jaxrl.cli.published import load_weights, open_parts
from jaxrl.config import ExperimentConfig
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
    # Before the wait: it holds nothing yet, and a mistake in the flags shows at once.
    engine = _engine(parts, options)
    if options.follow:
        _wait_for_first(options.run)
    params, version = load_weights(args, parts)
    driver = _driver(args, parts, engine, params, version)
    return Served(parts, driver.start())


def _driver(args: Any, parts: Parts, engine: Engine, params: Any, version: WeightVersion) -> Driver:
    """A driver of `engine`, to be started."""
    options: ServeOptions = args.options
    kept = options.prefix_cache_mb
    in_flight = args.config.rollout.in_flight if options.in_flight == "run" else options.in_flight
    return Driver(
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


def _wait_for_first(run: str) -> None:
    """Return once the run has a version."""
    store = WeightStore(RunDir(run).weights, read_only=True)
    if not store.numbers():
        _LOGGER.info("waiting for the first weights in %s", store.path)
    while not store.numbers():
        time.sleep(POLL_S)


def _engine(parts: Parts, options: ServeOptions) -> Engine:
    most = parts.model.config.max_length
    rollout, shards = parts.config.rollout, parts.slot_shards
    usual = parts.config.longest_sampled if rollout.samplers else min(most, SERVED_LENGTH)
    length = usual if options.max_length is None else options.max_length
    if length > most:
        raise ConfigError(f"--max-length={length} must be at most {most}, the model's own")
    slots = rollout.slots if options.slots is None else options.slots
    return Engine(
        parts.served_model,
        slots=-(-slots // shards) * shards,
        max_length=length,
        steps_per_dispatch=rollout.steps_per_dispatch,
        max_stop_tokens=max(8, len(parts.stop_ids)),
        top_logprobs=min(TOP_LOGPROBS, parts.model.config.vocab_size),
        mesh=parts.sampler_mesh,
        **_prefill(parts.config, options, length),
    )


def _prefill(config: ExperimentConfig, options: ServeOptions, length: int) -> dict[str, Any]:
    """The engine's options for prompts, of which the sizes change the last bits of what follows.

    Who samples for a run computes as its trainer would: the same programs, the same bits.
    """
    sizes = config.prompt_buckets if config.rollout.samplers else config.rollout.prefill_buckets
    buckets = [size for size in sizes if size <= length]
    if config.rollout.samplers:
        return {"prefill_buckets": buckets}
    chunk = min(options.prefill_chunk, length)
    return {"prefill_buckets": buckets, "prefill_chunk": chunk, **prefill_rows()}


def prefill_rows() -> dict[str, int]:
    """How many prompts share a prefill call, as an option of the engine where it is not its own.

    On CPUs a call of four takes nearly four times as long as a call of one, also with empty rows,
    and requests of different lengths seldom fill it.
    """
    return {"prefill_rows": 1} if jax.default_backend() == "cpu" else {}


class Follower:
    """Serves each new version of a run as it is published, from a thread, until `stop`.

    It looks for one every `poll_s` seconds, and whenever `look` asks it to. A version that cannot
    be read or fitted is reported, and the present one goes on serving. If the run goes back, as
    after a kill, and makes the present version anew or takes it away, the newest one is served by
    a new driver, `on_driver` is told of it, and completions that are under way end with an error.
    """

    def __init__(
        self,
        args: Any,
        parts: Parts,
        backend: Backend,
        *,
        poll_s: float = POLL_S,
        on_driver: Callable[[Driver], None] = lambda driver: None,
    ):
        self.loading: int | None = None
        self.problem = ""
        self._backend, self._poll_s, self._on_driver = backend, poll_s, on_driver
        self._store = WeightStore(RunDir(args.options.run).weights, read_only=True)
        self._read: Callable[[int], tuple[Any, WeightVersion]] = lambda number: load_weights(
            _with_version(args, number), parts
        )
        engine = backend.driver.engine
        self._make = lambda params, version: _driver(args, parts, engine, params, version)
        self._stopped = threading.Event()
        # Asked is raised by others, seen by the thread.
        self._wake, self._asked, self._seen = threading.Event(), itertools.count(1), (0, None)
        self._last_asked = 0
        self._thread = threading.Thread(target=self._run, name="jaxrl-follower", daemon=True)
        backend.follower = self
        self._thread.start()

    def stop(self) -> None:
        """Look for no more versions; one that is being read is dropped when it has been."""
        self._stopped.set()
        self._wake.set()

    def look(self) -> int:
        """As `serving.backend.Follows` says."""
        self._last_asked = next(self._asked)
        self._wake.set()
        return self._last_asked

    def newest(self, ticket: int) -> WeightVersion | None:
        """As `serving.backend.Follows` says."""
        seen, version = self._seen
        return version if seen >= ticket else None

    def _run(self) -> None:
        while True:
            self._wake.wait(self._poll_s)
            self._wake.clear()
            if self._stopped.is_set():
                return
            try:
                self._look()
            except DriverError as error:
                if self._stopped.is_set() or self._backend.driver.failure is not None:
                    return
                self._complain(str(error))
            except (JaxrlError, ValueError, OSError) as error:
                self._complain(str(error))
            except Exception as error:
                # No room on the device for second weights, say: later there may be.
                self._complain(f"{type(error).__name__}: {error}", exc_info=True)
            finally:
                self.loading = None

    def _look(self) -> None:
        asked, backend = self._last_asked, self._backend
        number = next(iter(self._store.numbers()[-1:]), None)
        newest = None if number is None else self._store.stamp(number).version
        self._seen = (asked, newest)
        present = backend.driver.version
        if newest is None or (newest == present and not backend.reloading):
            return
        self.loading = newest.number
        params, version = self._read(newest.number)
        if self._stopped.is_set():
            return
        if version.number > present.number and not backend.reloading:
            backend.set_weights(params, version)
        else:
            _LOGGER.warning("the run has taken %s back: serving %s instead", present, version)
            backend.reopen(lambda: self._make(params, version).start())
            self._on_driver(backend.driver)
        self.problem = ""
        _LOGGER.info("now serving weights %s", version)

    def _complain(self, complaint: str, *, exc_info: bool = False) -> None:
        """Once: the same thing goes wrong again at every look."""
        if complaint != self.problem:
            self.problem = complaint
            _LOGGER.warning("cannot follow the run, trying again: %s", complaint, exc_info=exc_info)


def _with_version(args: Any, number: int) -> Any:
    options = dataclasses.replace(args.options, version=number, follow=False)
    return dataclasses.replace(args, options=options)

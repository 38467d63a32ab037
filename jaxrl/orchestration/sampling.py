"""Who samples for the RL trainer, and how new weights get there: a driver in this process, or
serving processes that follow the run's store."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

from jaxrl.distributed import current
from jaxrl.errors import ConfigError
from jaxrl.inference.driver import Driver
from jaxrl.models.lora import split_frozen
from jaxrl.observe.logger import get_logger
from jaxrl.orchestration import hosts
from jaxrl.orchestration.samplers import make_driver
from jaxrl.orchestration.session import Session
from jaxrl.serving.auth import load_token
from jaxrl.types import Completion, Sampler, SamplingParams, WeightVersion
from jaxrl.weights.digest import stamp
from jaxrl.weights.exchange import Published, publish_to_sampler

_LOGGER = get_logger("orchestration")


class BlockingSampler(Sampler, Protocol):
    """A `Sampler` that also serves code without an event loop."""

    def sample_blocking(self, tokens: Any, params: SamplingParams) -> Completion:
        """tokens int32 [P] -> the completion."""


class Sampling(Protocol):
    """The sampling side of a run, as its trainer sees it."""

    sampler: Sampler
    """What episodes are sampled with; there after the first `publish`."""

    stores: bool
    """Whether every version is written to the store when it is published."""

    def publish(self, params: Any, number: int) -> WeightVersion:
        """Let `params` be sampled from as version `number`; they may be donated afterwards."""

    def pinned(self, version: WeightVersion) -> BlockingSampler:
        """A sampler for `version` alone, which was published last; waits until it is served."""

    def tokens(self) -> int:
        """How many tokens this process's episodes and evaluations have got so far."""

    def describe(self) -> str:
        """What the message of whoever waited for samples in vain ends with."""

    def tidy(self, keep: Callable[[int], bool]) -> None:
        """Delete the versions that nobody needs any more, but those whose number is to `keep`."""

    def stop(self) -> None:
        """Sample no more; may be repeated."""


def make_sampling(session: Session, longest: int) -> Sampling:
    """As `rollout.samplers` says; `longest` tokens have a sequence (0: as the config says).

    Raises `ConfigError`, `AuthenticationError` and `DeadlineError` for servers that cannot be used.
    """
    kind = ThroughStore if session.config.rollout.samplers else InMemory
    return kind(session, longest)


class InMemory:
    """A driver in this process, with a copy of the weights on its devices."""

    stores = False

    def __init__(self, session: Session, longest: int):
        self._session, self._longest = session, longest
        self._frozen: Any = None
        self._driver: Driver | None = None

    @property
    def sampler(self) -> Driver:
        """The driver."""
        return self._driver

    def publish(self, params: Any, number: int) -> WeightVersion:
        """As `Sampling` says."""
        copy, version, digest = published = self._copy(params, number)
        if self._driver is None:
            current().idle("compiling the sampler's programs")
            # A narrower copy was verified on its way.
            self._driver = make_driver(
                self._session.parts,
                copy,
                version,
                max_length=self._longest,
                verify=not published.narrow,
            )
        else:
            self._driver.set_weights(copy, version)
        fields = {"sampled_as": digest} if published.narrow else {}
        self._session.ledger.published(version, where="memory", **fields)
        return version

    def _copy(self, params: Any, number: int) -> Published:
        """What the driver of this process gets."""
        parts = self._session.parts
        published = publish_to_sampler(
            params,
            number,
            parts.served_model.abstract,
            parts.served_model.shardings(parts.sampler_mesh),
            meshes=parts.sampler_meshes if hosts.count() > 1 else (),
            frozen=self._frozen,
        )
        self._frozen = split_frozen(published.params)[1] or None
        return published

    def pinned(self, version: WeightVersion) -> Driver:
        """As `Sampling` says: the driver serves nothing else until the next `publish`."""
        return self._driver

    def tokens(self) -> int:
        """As `Sampling` says."""
        return self._driver.stats().tokens

    def describe(self) -> str:
        """As `Sampling` says."""
        return ""

    def tidy(self, keep: Callable[[int], bool]) -> None:
        """As `Sampling` says: there are none."""

    def stop(self) -> None:
        """As `Sampling` says."""
        if self._driver is not None:
            self._driver.stop()


class ThroughStore:
    """Servers that follow the store of the run, to which every version is written."""

    stores = True

    def __init__(self, session: Session, longest: int):
        if importlib.util.find_spec("aiohttp") is None:
            raise ConfigError("rollout.samplers needs aiohttp: pip install 'jaxrl[serve]'")
        from jaxrl.serving.client import Needs, RemoteSampler

        config, parts = session.config, session.parts
        self._session, self._first = session, -1
        rollout = config.rollout
        self.sampler = RemoteSampler(
            rollout.samplers,
            Needs(longest or config.longest_sampled, parts.model_meaning),
            tokenizer=parts.tokenizer,
            token=load_token(rollout.samplers_token_file, option="rollout.samplers_token_file"),
            wait_s=rollout.wait_timeout_s,
        )
        self.sampler.start()
        _LOGGER.info("sampling through %s", ", ".join(rollout.samplers))
        try:
            hosts.together("reaching the samplers", self._waiting(self.sampler.wait_until_reached))
        except BaseException:
            self.sampler.stop()
            raise

    def publish(self, params: Any, number: int) -> WeightVersion:
        """As `Sampling` says; the first time it waits until all servers serve the version."""
        first, version = self._first < 0, stamp(params, number)
        self._first = number if first else self._first
        # Before the store: a server may answer with this version as soon as it is there.
        oldest = max(self._first, number - self._session.config.rollout.max_staleness)
        self.sampler.publish(version, oldest=oldest)
        current().verify(f"version {number}")
        self._session.store.publish(params, version)
        self._session.ledger.published(version, where="store")
        if first:
            _LOGGER.info("waiting for the samplers to serve %s", version)
            hosts.together("waiting for the samplers", self._waiting(self.sampler.wait_until_ready))
        return version

    def _waiting(self, wait: Callable[[], None]) -> Callable[[], bytes]:
        def work() -> bytes:
            # The first weights may take long to be read: signals are heard meanwhile.
            with self._session.interrupts.released():
                wait()
            return b""

        return work

    def pinned(self, version: WeightVersion) -> BlockingSampler:
        """As `Sampling` says."""
        pinned = []
        hosts.together(
            "waiting for a sampler",
            self._waiting(lambda: pinned.append(self.sampler.sampler_of(version))),
        )
        return pinned[0]

    def tokens(self) -> int:
        """As `Sampling` says."""
        return self.sampler.tokens

    def describe(self) -> str:
        """As `Sampling` says."""
        return f"; samplers: {self.sampler.describe()}"

    def tidy(self, keep: Callable[[int], bool]) -> None:
        """As `Sampling` says. What may still be sampled from, or is being read, stays."""
        if hosts.index() > 0:
            return
        window = max(1, self._session.config.rollout.max_staleness) + 1
        older = self._session.store.numbers()[:-window]
        kept = set(filter(keep, older))
        if kept != set(older):
            self._session.store.prune(window, pinned=kept | self.sampler.loading())

    def stop(self) -> None:
        """As `Sampling` says."""
        self.sampler.stop()

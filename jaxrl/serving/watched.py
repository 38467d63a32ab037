"""A server as the client of a run knows it: what it does, whether it fits, and what is proven."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.errors import ConfigError, WeightVersionError
from jaxrl.observe.logger import get_logger
from jaxrl.serving.remote import RemoteServer, Told
from jaxrl.types import WeightVersion

_LOGGER = get_logger("serving")


@dataclasses.dataclass(frozen=True)
class Needs:
    """What the servers must be able to do: sequences of `max_length` tokens, a model whose fields
    mean `model_meaning`."""

    max_length: int
    model_meaning: Mapping[str, Any]


class Watched:
    """A server, and what is known of it."""

    def __init__(self, server: RemoteServer):
        self.server, self.url = server, server.url
        self.told = Told("unknown")
        self.reached = False
        self.doubted = False
        self.trouble = "not asked yet"
        self.since = time.monotonic()
        self.rests_until = 0.0
        self.used = 0
        self.calls: set[asyncio.Task[Any]] = set()

    def up(self, told: Told) -> bool:
        """It has answered; True if that is news."""
        before, back = (self.serving, self.told.state), not self.reached
        self.reached, self.doubted, self.told = True, False, told
        if back:
            self.since = time.monotonic()
            _LOGGER.info("sampler %s", self.describe())
        return back or before != (self.serving, told.state)

    def down(self, trouble: str) -> bool:
        """It does not answer; True if it did before. Its calls are cut."""
        lost, self.reached, self.trouble = self.reached, False, trouble
        if lost:
            self.since = time.monotonic()
            _LOGGER.warning("sampler %s", self.describe())
        for call in self.calls:
            call.cancel()
        return lost

    def describe(self) -> str:
        """What it does, in words."""
        if not self.reached:
            seconds = time.monotonic() - self.since
            return f"{self.url} has not answered for {seconds:.0f} s ({self.trouble})"
        told = self.told
        problem = f" ({told.problem})" if told.problem else ""
        if told.state != "ready" or told.serving is None:
            return f"{self.url} is {told.state}{problem}"
        return f"{self.url} serves {told.serving}{problem}"

    @property
    def serving(self) -> WeightVersion | None:
        """The version that a request would be sampled from; None if it takes none, or if a
        connection to it broke since it was last asked."""
        usable = self.reached and self.told.state == "ready" and not self.doubted
        return self.told.serving if usable else None

    def check(self, told: Told, needs: Needs) -> None:
        """Raise `ConfigError` for a server that can never be of use, with both values."""
        if told.serving is None:
            return
        name = f"rollout.samplers: {self.url}"
        if not told.follows:
            raise ConfigError(f"{name} follows no run: start it with --follow")
        if told.logprobs != "sampled":
            raise ConfigError(
                f"{name} tells log-probabilities of {told.logprobs!r}, which are not those of the "
                "distribution that it samples from"
            )
        if told.max_length < needs.max_length:
            raise ConfigError(
                f"{name} takes sequences of {told.max_length} tokens, and the run samples "
                f"{needs.max_length}: start it with --max-length={needs.max_length} or more"
            )
        for field, value in needs.model_meaning.items():
            if told.model_meaning.get(field) != value:
                raise ConfigError(
                    f"{name} serves a model with {field}={told.model_meaning.get(field)!r}, the "
                    f"run's has {value!r}: its --run must be this run's output_dir"
                )

    def check_run(
        self, told: Told, wanted: WeightVersion | None, published: Mapping[int, str]
    ) -> None:
        """Raise `WeightVersionError` if it follows another run than the one that has `published`
        these digests, `wanted` last."""
        newest = told.newest
        if newest is None or wanted is None or newest.number < wanted.number:
            return
        # All that is in the store of this run was published here, or before it was resumed.
        if published.get(newest.number) != newest.digest:
            raise WeightVersionError(
                f"sampler {self.url} follows a run whose newest version is {newest.number} with "
                f"digest {newest.digest}; this run has published version {wanted.number} with "
                f"digest {wanted.digest}"
            )

    def prove(self, versions: Sequence[WeightVersion], published: Mapping[int, str]) -> None:
        """Raise `WeightVersionError` unless these versions of an answer are the published ones."""
        for version in versions:
            known = published.get(version.number)
            if known != version.digest:
                how = f"with digest {known}" if known else "never"
                raise WeightVersionError(
                    f"sampler {self.url} sampled from version {version.number} with digest "
                    f"{version.digest or 'unknown'}; this run has published it {how}"
                )

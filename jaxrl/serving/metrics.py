"""What a server counts, for Prometheus and for its status page."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from jaxrl.serving.backend import Backend

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WINDOW_S, _STEP_S = 10, 0.1

GAUGES = {
    "slots": "sequences that can be decoded at once",
    "running": "sequences that are being decoded",
    "waiting": "requests in the queue",
    "kv_bytes": "memory of the keys and values of all slots",
    "prefix_bytes": "memory of the prefixes that are kept",
    "prefix_limit_bytes": "memory that kept prefixes may take",
}
COUNTERS = {
    "tokens": "tokens sampled",
    "dispatches": "calls of the decode program",
    "prefills": "calls of the prefill program",
    "finished": "completions that ended",
    "cancelled": "requests whose client left, or whose text had reached a stop string",
    "expired": "requests that ran out of time",
    "refused": "requests that found the queue full",
    "prefix_tokens": "prompt tokens",
    "prefix_hit_tokens": "prompt tokens that a kept prefix held already",
    "prefix_evictions": "prefixes given up for want of room",
    "busy_seconds": "seconds that the driver has worked",
}
"""Of `DriverStats`, and what they mean."""


class Metrics:
    """A `Meter`, and a registry of its own that Prometheus reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first = Histogram(
            "jaxrl_time_to_first_token_seconds",
            "from the arrival of a request to its first tokens",
            buckets=_FIRST,
            registry=self.registry,
        )
        self._between = Histogram(
            "jaxrl_inter_token_seconds",
            "from one token of a completion to the next, in each dispatch the mean",
            buckets=_BETWEEN,
            registry=self.registry,
        )
        self._requests = Counter(
            "jaxrl_requests", "completions by outcome", ["outcome"], registry=self.registry
        )
        self._responses = Counter(
            "jaxrl_http_responses",
            "HTTP responses",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self.outcomes: collections.Counter[str] = collections.Counter()

    def watch(self, backend: Backend) -> None:
        """Also show the counts of this server's driver."""
        self.registry.register(_DriverCollector(backend))

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Tokens that came together, `seconds` after what was before them."""
        if first:
            self._first.observe(seconds)
        else:
            for _ in range(count):
                self._between.observe(seconds / count)
        now = time.monotonic()
        together = self._recent and now - self._recent[-1][0] < _STEP_S
        before = self._recent.pop()[1] if together else 0
        self._recent.append((now, before + count))
        self._forget(now)

    def finished(self, outcome: str) -> None:
        """The end of a completion."""
        self._requests.labels(outcome).inc()
        self.outcomes[outcome] += 1

    def responded(self, endpoint: str, status: int) -> None:
        """An HTTP response; `endpoint` is a route, never what a client wrote."""
        self._responses.labels(endpoint, str(status)).inc()

    def tokens_per_second(self) -> float:
        """Of the last ten seconds."""
        now = time.monotonic()
        self._forget(now)
        return sum(count for _, count in self._recent) / _WINDOW_S

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > _WINDOW_S:
            self._recent.popleft()


class _DriverCollector:
    """Reads the driver's own counts when somebody asks."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def collect(self) -> Iterator[Any]:
        """The metrics of this moment; while the model loads, only that it does."""
        backend = self._backend
        state = GaugeMetricFamily("jaxrl_ready", "1 if requests are served, else 0")
        state.add_metric([], float(backend.state == "ready"))
        yield state
        if backend.driver is None:
            return
        stats = backend.driver.stats()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"jaxrl_{name}", text, value=getattr(stats, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"jaxrl_{name}", text, value=getattr(stats, name))
        version = backend.driver.version
        yield GaugeMetricFamily(
            "jaxrl_weight_version", "number of the weights that are served", value=version.number
        )
        live = "weight versions that sequences still use"
        yield GaugeMetricFamily("jaxrl_live_versions", live, value=len(stats.live_versions))
        info = {"version": str(version), "digest": version.digest, "model": backend.name}
        yield InfoMetricFamily("jaxrl_weights", "the weights that are served", value=info)

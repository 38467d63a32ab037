"""After warm-up the RL loop compiles nothing, and the host reads device arrays in few places."""

from __future__ import annotations

import collections
import contextlib
import threading

import jax
from host_sync import counting_host_syncs

from jaxrl import RLTrainer

WARM_UP = 3

ALLOWED = {
    # One transfer for k tokens of all slots: the only wait inside a dispatch.
    "inference.batcher:step",
    # The version's digest is a digest of bytes, and whether an update was finite must be known
    # before its weights are published.
    "weights.digest:compute_digest",
    "orchestration.recovery:require_finite",
    # Values of earlier updates, which the device has finished.
    "observe.tracker:flush",
}


class Watched(RLTrainer):
    """Counts compilations and reads of device arrays from the fourth update on."""

    def __init__(self, config):
        super().__init__(config, devices=jax.devices()[:1])
        self.compiled, self.dispatches, self._watching = [], 0, contextlib.ExitStack()

    def _update(self, *args):
        if self.updates == WARM_UP:
            self.syncs = self._watching.enter_context(counting_host_syncs())
            jax.monitoring.register_event_duration_secs_listener(self._note)
            self._watching.callback(jax.monitoring.unregister_event_duration_listener, self._note)
            self.dispatches = -self._sampling.sampler.stats().dispatches
        super()._update(*args)
        if self.updates == self.config.train.steps:
            self.dispatches += self._sampling.sampler.stats().dispatches
            self._watching.close()

    def _note(self, event, seconds, **details):
        if "backend_compile" in event:
            self.compiled.append((event, details, threading.current_thread().name))


def test_rl_loop_after_warm_up_neither_compiles_nor_waits_where_it_need_not(make_config):
    config = make_config(
        train={"steps": 8},
        rollout={"max_staleness": 1},
        checkpoint={"every": 0, "publish_every": 0},
    )

    with Watched(config) as trainer:
        trainer.fit()

    assert trainer.compiled == []
    callers = collections.Counter(read.caller for read in trainer.syncs.reads)
    assert set(callers) <= ALLOWED, trainer.syncs.reads
    # A dispatch that began before may end within, and the other way round.
    assert abs(callers["inference.batcher:step"] - trainer.dispatches) <= 1
    assert callers["orchestration.recovery:require_finite"] == config.train.steps - WARM_UP

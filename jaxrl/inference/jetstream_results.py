"""What JetStream's verbs give for each token: its `ResultTokens`, with versions and
log-probabilities in columns that it does not look at."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxrl.inference.jetstream_prefix import LENGTH, LOGP, STREAM, TOKEN, VALID, VERSION
from jaxrl.inference.jetstream_text import now_reading


@dataclasses.dataclass(frozen=True)
class Records:
    """What a result tells of each row: int32 [S] all, but logprobs float32 [S].

    `lengths` count the tokens given out, this one included. `versions` are those of the weights
    whose logits gave the tokens; -1 where none did (the end of a sequence, told again). `streams`
    tell requests apart.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    versions: np.ndarray
    logprobs: np.ndarray
    streams: np.ndarray


def read_records(result: Any) -> Records:
    """The records of a `ResultTokens` of our engine; waits for the device."""
    data = np.asarray(result.data)
    logprobs = np.ascontiguousarray(data[:, LOGP]).view(np.float32)
    tokens, lengths, versions = (data[:, column] for column in (TOKEN, LENGTH, VERSION))
    return Records(tokens, lengths, versions, logprobs, data[:, STREAM])


def result_maker(api: ModuleType) -> Callable[[jax.Array, jax.Array, int], Any]:
    """-> a function of (result int32 [S, 6], log-probabilities float32 [S, 1], samples per slot)
    that makes a `ResultTokens` of `api`, JetStream's module `engine_api`."""
    from flax import struct

    class Results(api.ResultTokens):
        """Tells the tokenizer whose token is read."""

        def convert_to_numpy(self) -> Any:
            logprobs = getattr(self, "log_prob", None)
            host = {} if logprobs is None else {"log_prob": np.asarray(logprobs)}
            return dataclasses.replace(self, data=np.asarray(self.data), **host)

        def get_result_at_slot(self, slot: int) -> Any:
            now_reading(int(self.data[slot * self.samples_per_slot, STREAM]))
            return super().get_result_at_slot(slot)

        def get_result_at_slots(self, slots: Any) -> Any:
            # Tokens of several sequences at once: nobody says which is decoded when.
            one = np.ndim(slots) == 0 or len(slots) == 1
            now_reading(int(self.data[np.ravel(slots)[0], STREAM]) if one else None)
            return super().get_result_at_slots(slots)

    made = struct.dataclass(Results)
    later = "log_prob" in {field.name for field in dataclasses.fields(api.ResultTokens)}

    def make(data: jax.Array, logprobs: jax.Array, samples: int) -> Any:
        extra = {"log_prob": logprobs} if later else {}
        return made(
            data=data,
            tokens_idx=(TOKEN, TOKEN + 1),
            valid_idx=(VALID, VALID + 1),
            length_idx=(LENGTH, LENGTH + 1),
            samples_per_slot=samples,
            **extra,
        )

    return make


class Streams:
    """Numbers that tell requests apart, in the whole process; they fit int32 and come round."""

    def __init__(self) -> None:
        self._next = 0
        self._lock = threading.Lock()

    def reserve(self, count: int) -> int:
        """The first of `count` numbers that nobody else has."""
        with self._lock:
            first = self._next if self._next + count < 1 << 31 else 0
            self._next = first + count
            return first

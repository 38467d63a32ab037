"""The interface of JetStream's last development version, which no release has: names and
signatures only, for proving that our engine has all of it."""

from __future__ import annotations

import abc
from typing import Any

from flax import struct


@struct.dataclass
class ExistingPrefix:
    cache: Any
    common_prefix_tokens: Any


@struct.dataclass
class SlotData:
    tokens: Any
    valid: Any
    lengths: Any
    log_prob: Any = None


@struct.dataclass
class ResultTokens(abc.ABC):
    data: Any
    tokens_idx: tuple[int, int] = struct.field(pytree_node=False)
    valid_idx: tuple[int, int] = struct.field(pytree_node=False)
    length_idx: tuple[int, int] = struct.field(pytree_node=False)
    samples_per_slot: int = struct.field(pytree_node=False)
    log_prob: Any = struct.field(pytree_node=False, default=None)

    def copy_to_host_async(self):
        self.data.copy_to_host_async()

    def get_result_at_slot(self, slot):
        rows = slice(slot * self.samples_per_slot, (slot + 1) * self.samples_per_slot)
        return self._rows(rows)

    def get_result_at_slots(self, slots):
        return self._rows(slots)

    def _rows(self, rows):
        tokens, valid, lengths = (
            self.data[rows, slice(*span)]
            for span in (self.tokens_idx, self.valid_idx, self.length_idx)
        )
        return SlotData(tokens, valid, lengths[:, 0], self.log_prob[rows, :])


class Engine(abc.ABC):
    @abc.abstractmethod
    def prefill(
        self,
        *,
        params,
        existing_prefix=None,
        padded_tokens,
        true_length,
        sampler=None,
        request_id=None,
    ): ...

    @abc.abstractmethod
    def prefill_multisampling(
        self,
        *,
        params,
        existing_prefix=None,
        padded_tokens,
        true_length,
        sampler=None,
        rng=None,
        num_samples=1,
    ): ...

    @abc.abstractmethod
    def generate(self, params, decode_state, sampler=None): ...

    @abc.abstractmethod
    def insert(self, prefix, decode_state, slot, request_id=None): ...

    @abc.abstractmethod
    def bulk_insert(self, prefix, decode_state, slots): ...

    def free_resource(self, slot):
        return None

    @abc.abstractmethod
    def load_params(self, *args, **kwargs): ...

    @abc.abstractmethod
    def get_prefix_destination_sharding(self): ...

    @abc.abstractmethod
    def get_tokenizer(self): ...

    @abc.abstractmethod
    def build_tokenizer(self, metadata): ...

    @abc.abstractmethod
    def init_decode_state(self, *args, **kwargs): ...

    @property
    @abc.abstractmethod
    def max_concurrent_decodes(self): ...

    @property
    @abc.abstractmethod
    def samples_per_slot(self): ...

    @property
    @abc.abstractmethod
    def max_prefill_length(self): ...

    @property
    @abc.abstractmethod
    def mesh(self): ...

    @property
    @abc.abstractmethod
    def colocated_cpus(self): ...

    @property
    @abc.abstractmethod
    def use_chunked_prefill(self): ...

    @property
    @abc.abstractmethod
    def prefill_chunk_size(self): ...


class JetStreamEngine(Engine):
    """Its name is how the two APIs are told apart."""

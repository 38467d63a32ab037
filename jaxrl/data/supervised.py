"""Batches for supervised training on the answers, with a position that can be saved."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from jaxrl.algorithms.weights import token_weights
from jaxrl.data.examples import Example
from jaxrl.data.packing import pack_sequences, rows_bound
from jaxrl.data.prompts import encode_prompts
from jaxrl.data.tokenizers import Tokenizer
from jaxrl.errors import DataError
from jaxrl.types import NO_VERSION, TrajectoryBatch

if TYPE_CHECKING:
    from jaxrl.data.chat import ChatPrompts


class SupervisedBatches:
    """Endless iterator of `TrajectoryBatch`: every batch packs `batch_size` sequences.

    A sequence is the prompt, the demonstration (the answer, or a solution that ends with it) and
    eos; the loss counts the last two. With `chat` it is the conversation, the assistant's reply and
    what ends a reply in that template. Examples are
    shuffled anew every epoch. The shape [rows, row_length] never changes: without `rows` it is the
    least number that holds any batch. `state()` is the position, as JSON; after `restore(state)`
    the same batches follow, bit for bit.

    Raises `DataError` at construction for a sequence or a batch that might not fit.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        row_length: int,
        seed: int,
        rows: int | None = None,
        normalisation: str = "token",
        chat: ChatPrompts | None = None,
    ):
        prompts = encode_prompts(examples, tokenizer, None, chat)
        self._sequences = [
            _sequence(prompt, _answer(example.demonstration, tokenizer, chat))
            for example, prompt in zip(examples, prompts, strict=True)
        ]
        self._row_length = row_length
        self._normalisation = normalisation
        self._rows = self._check_rows(batch_size, rows)
        self._batch_size, self._seed = batch_size, seed
        order = grain.MapDataset.range(len(self._sequences)).seed(seed).shuffle().repeat()
        batches = order.batch(batch_size, drop_remainder=True, batch_fn=list).map(self._pack)
        # No reading threads: packing takes far less than an update, and none must be stopped.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(batches.to_iter_dataset(options))

    @property
    def rows(self) -> int:
        """Number of rows of every batch."""
        return self._rows

    def __iter__(self) -> SupervisedBatches:
        return self

    def __next__(self) -> TrajectoryBatch:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """The position after the last batch that was taken, ready for JSON."""
        return {"position": self._iterator.get_state(), "fingerprint": self._fingerprint()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position that `state()` gave. Raises `DataError` if data or settings changed."""
        if not isinstance(state, dict) or state.keys() != {"position", "fingerprint"}:
            raise DataError(f"not a position of supervised batches: {state!r}")
        if state["fingerprint"] != self._fingerprint():
            raise DataError(
                "the position belongs to other examples or settings: it was saved with "
                f"{state['fingerprint']}, these are {self._fingerprint()}"
            )
        self._iterator.set_state(state["position"])

    def _fingerprint(self) -> dict[str, Any]:
        """What decides which examples a position means."""
        digest = hashlib.sha256()
        for sequence in self._sequences:
            digest.update(len(sequence["tokens"]).to_bytes(8, "little"))
            digest.update(sequence["tokens"].tobytes())
            digest.update(sequence["loss_mask"].tobytes())
        return {
            "examples": digest.hexdigest()[:16],
            "batch_size": self._batch_size,
            "seed": self._seed,
        }

    def _check_rows(self, batch_size: int, rows: int | None) -> int:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size} must be at least 1")
        lengths = [len(sequence["tokens"]) for sequence in self._sequences]
        longest = int(np.argmax(lengths))
        if lengths[longest] > self._row_length:
            raise DataError(
                f"example {longest} has {lengths[longest]} tokens (prompt, answer, eos), more than "
                f"row_length={self._row_length}"
            )
        enough = rows_bound(batch_size, lengths[longest], self._row_length)
        if rows is not None and rows < enough:
            raise DataError(
                f"rows={rows} of {self._row_length} tokens may not hold batch_size={batch_size} "
                f"sequences of up to {lengths[longest]} tokens; that needs {enough}"
            )
        return enough if rows is None else rows

    def _pack(self, indices: list[int]) -> TrajectoryBatch:
        packed = pack_sequences(
            [self._sequences[index] for index in indices],
            rows=self._rows,
            row_length=self._row_length,
        )
        mask, segment_ids = packed["loss_mask"], packed["segment_ids"]
        zeros = np.zeros(mask.shape, np.float32)
        return TrajectoryBatch(
            tokens=packed["tokens"],
            positions=packed["positions"],
            segment_ids=segment_ids,
            loss_mask=mask,
            loss_weights=token_weights(mask, segment_ids, self._normalisation),
            advantages=zeros,
            behavior_logp=zeros.copy(),
            versions=np.full(mask.shape, NO_VERSION, np.int32),
        )


def _answer(text: str, tokenizer: Tokenizer, chat: ChatPrompts | None) -> list[int]:
    """What is trained on, with the token that ends it."""
    return [*tokenizer.encode(text), tokenizer.eos_id] if chat is None else chat.encode_reply(text)


def _sequence(prompt: np.ndarray, answer: list[int]) -> dict[str, np.ndarray]:
    """Tokens and loss mask [T] of one example; `restore` relies on nothing but these."""
    tokens = np.concatenate([prompt, np.array(answer, np.int32)])
    return {"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= len(prompt)}


def careless(
    examples: Sequence[Example], *, fraction: float, above: int, seed: int
) -> list[Example]:
    """Imperfect demonstrations: answers longer than `above` characters lose their last one.

    Which ones is drawn once per example, with probability `fraction`, and does not depend on order
    or number of the others' draws: the same seed gives the same demonstrations.
    """
    cut = np.random.default_rng(seed).random(len(examples)) < fraction
    return [
        dataclasses.replace(example, **{_taught(example): example.demonstration[:-1]})
        if chosen and len(example.demonstration) > max(above, 1)
        else example
        for example, chosen in zip(examples, cut, strict=True)
    ]


def _taught(example: Example) -> str:
    """The field that supervised training learns from."""
    return "target" if example.target else "answer"

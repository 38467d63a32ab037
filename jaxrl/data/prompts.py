"""Prompts: examples as workflows take them, in an endless stream or a fixed list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from jaxrl.data.examples import Example
from jaxrl.data.specials import encode_pieces
from jaxrl.data.tokenizers import Tokenizer
from jaxrl.errors import DataError
from jaxrl.types import Prompt

if TYPE_CHECKING:
    from jaxrl.data.chat import ChatPrompts


class PromptStream:
    """`stream[i] -> Prompt` for every i >= 0: all examples once an epoch, shuffled anew each time.

    It has no state: the caller's index is the whole position, and the same seed and examples give
    the same prompts after a restart. Ids are "train/e0/00017" (epoch, place of the example).
    Raises `DataError` at construction for a prompt that is empty or too long.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        *,
        seed: int,
        max_prompt_tokens: int | None = None,
        split: str = "train",
        chat: ChatPrompts | None = None,
    ):
        """`max_prompt_tokens` None means any length; `seed` >= 0; `split` only names the ids.

        With `chat` the text of each prompt is what the user says in it.
        """
        self._examples = list(examples)
        self._tokens = encode_prompts(self._examples, tokenizer, max_prompt_tokens, chat)
        self._split = split
        order = grain.MapDataset.range(len(self._examples))
        self._order = order.seed(seed).shuffle().repeat()

    @property
    def epoch_length(self) -> int:
        """Number of prompts in one epoch."""
        return len(self._examples)

    def __getitem__(self, index: int) -> Prompt:
        if index < 0:
            # Python would count from the end, which this stream does not have.
            raise IndexError(f"prompt index {index} must be at least 0")
        place = int(self._order[index])
        epoch = index // len(self._examples)
        return _prompt(self._split, epoch, place, index, self._examples[place], self._tokens[place])


def eval_prompts(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int | None = None,
    chat: ChatPrompts | None = None,
) -> list[Prompt]:
    """Every example once, in order, with ids "eval/e0/00000", …  Raises `DataError`."""
    tokens = encode_prompts(examples, tokenizer, max_prompt_tokens, chat)
    return [
        _prompt("eval", 0, index, index, example, tokens[index])
        for index, example in enumerate(examples)
    ]


def encode_prompt(
    example: Example, tokenizer: Tokenizer, chat: ChatPrompts | None = None
) -> np.ndarray:
    """Token ids int32 [P] of one prompt: the text of the example, or a chat that asks it.

    Special tokens are recognised in the template only: a question that holds "<|im_end|>" is
    encoded as those characters. Tokenizers that want a bos before a text get it; a chat has what
    its template writes.
    """
    if chat is not None:
        return chat.encode(example.prompt)
    prefix = list(tokenizer.prompt_prefix)
    ids = encode_pieces(example.pieces(), tokenizer)
    # The template may begin with the bos itself.
    return np.array(ids if prefix and ids[: len(prefix)] == prefix else prefix + ids, np.int32)


def encode_prompts(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    max_prompt_tokens: int | None,
    chat: ChatPrompts | None = None,
) -> list[np.ndarray]:
    """Token ids of all prompts, read-only. Raises `DataError` that names a prompt that is bad."""
    if not examples:
        raise DataError("there are no examples to make prompts of")
    encoded = []
    for index, example in enumerate(examples):
        if not example.prompt.strip():
            raise DataError(f"the prompt of example {index} is empty: {example.prompt!r}")
        tokens = encode_prompt(example, tokenizer, chat)
        if max_prompt_tokens is not None and len(tokens) > max_prompt_tokens:
            raise DataError(
                f"the prompt of example {index} has {len(tokens)} tokens, more than "
                f"max_prompt_tokens={max_prompt_tokens}: {example.prompt[:60]!r}"
            )
        tokens.setflags(write=False)  # one array serves every sample of the prompt
        encoded.append(tokens)
    return encoded


def _prompt(
    split: str, epoch: int, place: int, index: int, example: Example, tokens: np.ndarray
) -> Prompt:
    reference: dict[str, Any] = {
        "answer": example.answer,
        "question": example.question,
        "metadata": example.metadata,
    }
    return Prompt(f"{split}/e{epoch}/{place:05d}", index, example.prompt, tokens, reference)

"""Supervised batches: what is trained on, fixed shapes, positions that can be saved."""

from __future__ import annotations

import json

import numpy as np
import pytest
from data.chat_cases import chat_of
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl.data.chat import ChatPrompts
from jaxrl.data.examples import Example
from jaxrl.data.supervised import SupervisedBatches
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.errors import DataError

CHARS = load_tokenizer("chars")


def examples(count):
    return [Example(f"{i}:" + "q" * (i % 5), "a" * (1 + i % 3) + str(i)) for i in range(count)]


def batches(count=11, **changes):
    settings = {"batch_size": 4, "row_length": 20, "seed": 1} | changes
    return SupervisedBatches(examples(count), CHARS, **settings)


def sequences(batch):
    """(prompt text, trained text with eos as $) of every sequence in a batch."""
    found = []
    for row in range(batch.tokens.shape[0]):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            place = batch.segment_ids[row] == segment
            tokens, mask = batch.tokens[row][place], batch.loss_mask[row][place]
            text = CHARS.decode(tokens[mask][:-1])
            assert tokens[-1] == CHARS.eos_id
            found.append((CHARS.decode(tokens[~mask]), text))
    return found


def test_supervised_batches_train_on_answer_and_eos_only():
    known = {(e.prompt, e.answer) for e in examples(11)}

    batch = next(batches())

    found = sequences(batch)
    assert len(found) == 4
    assert set(found) <= known
    assert_allclose(batch.loss_weights.sum(dtype=np.float64), 1.0, rtol=0, atol=1e-6)
    assert_array_equal(batch.loss_weights > 0, batch.loss_mask)
    assert not batch.advantages.any()
    assert not batch.behavior_logp.any()
    assert (batch.versions == -1).all()


def test_supervised_batches_train_on_the_whole_solution_where_there_is_one():
    solved = [Example(f"{i}?", str(i), target=f"so {i}") for i in range(4)]

    batch = next(SupervisedBatches(solved, CHARS, batch_size=4, row_length=20, seed=1))

    assert set(sequences(batch)) == {(f"{i}?", f"so {i}") for i in range(4)}


def test_supervised_batches_shape_and_dtypes_never_change():
    stream = batches()
    expected = {
        "tokens": np.int32,
        "positions": np.int32,
        "segment_ids": np.int32,
        "loss_mask": np.bool_,
        "loss_weights": np.float32,
        "advantages": np.float32,
        "behavior_logp": np.float32,
        "versions": np.int32,
    }

    for _ in range(20):
        arrays = next(stream).arrays()
        assert {name: array.dtype for name, array in arrays.items()} == expected
        assert {array.shape for array in arrays.values()} == {(stream.rows, 20)}


def test_supervised_batches_epochs_hold_every_example_once_and_differ_in_order():
    stream = batches(count=12)

    epochs = [[s for _ in range(3) for s in sequences(next(stream))] for _ in range(2)]

    for epoch in epochs:
        assert sorted(epoch) == sorted((e.prompt, e.answer) for e in examples(12))
    assert epochs[0] != epochs[1]


def assert_same(first, second):
    for name, array in first.arrays().items():
        assert_array_equal(array, second.arrays()[name])


@pytest.mark.parametrize("taken", [0, 1, 5, 9])
def test_restore_gives_bit_identical_following_batches(taken):
    stream = batches()
    for _ in range(taken):
        next(stream)
    state = json.loads(json.dumps(stream.state()))
    expected = [next(stream) for _ in range(6)]

    other = batches()
    next(other)
    other.restore(state)

    for batch in expected:
        assert_same(next(other), batch)


@pytest.mark.parametrize(
    "other", [{"count": 12}, {"batch_size": 5}, {"seed": 2}], ids=["examples", "batch", "seed"]
)
def test_restore_position_of_other_data_raises(other):
    state = batches().state()

    with pytest.raises(DataError, match="belongs to other examples or settings"):
        batches(**other).restore(state)


def test_restore_what_is_no_position_raises():
    with pytest.raises(DataError, match="not a position"):
        batches().restore({"next_index": 3})


def test_supervised_batches_given_rows_are_kept():
    assert batches(rows=7).rows == 7
    assert next(batches(rows=7)).tokens.shape == (7, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_length": 9}, "has 10 tokens .prompt, answer, eos., more than row_length=9"),
        ({"rows": 1}, "rows=1 of 20 tokens may not hold batch_size=4"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"normalisation": "mean"}, "normalisation='mean'"),
    ],
)
def test_supervised_batches_settings_that_do_not_fit_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        next(batches(**changes))


def test_supervised_batches_prompt_and_answer_fill_the_row_exactly():
    stream = SupervisedBatches([Example("abc", "de")], CHARS, batch_size=1, row_length=6, seed=0)

    batch = next(stream)

    assert batch.tokens.tolist() == [[*CHARS.encode("abcde"), CHARS.eos_id]]
    assert batch.loss_mask.tolist() == [[False, False, False, True, True, True]]


def test_supervised_batches_of_chats_train_on_the_reply_and_its_end():
    chat = ChatPrompts(chat_of("gemma"))
    tokenizer = chat.template.tokenizer
    example = Example("2+2=", "four<end_of_turn>")

    batch = next(
        SupervisedBatches([example], tokenizer, batch_size=1, row_length=99, seed=0, chat=chat)
    )

    tokens, mask = batch.tokens[0][batch.segment_ids[0] > 0], batch.loss_mask[0]
    # Gemma ends texts with <eos>, but messages with <end_of_turn>: the one that is no text.
    end = tokenizer.special_tokens["<end_of_turn>"]
    assert tokens.tolist() == [*chat.encode("2+2="), *tokenizer.encode("four<end_of_turn>"), end]
    assert mask.sum() == len(tokens) - len(chat.encode("2+2="))
    whole = [*chat.messages("2+2="), {"role": "assistant", "content": "four<end_of_turn>"}]
    written = chat.template.encode(whole, add_generation_prompt=False)
    assert tokens.tolist() == written[: len(tokens)].tolist()

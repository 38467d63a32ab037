"""The endless prompt stream and the list for evaluation."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from data.chat_cases import chat_of
from numpy.testing import assert_array_equal

from jaxrl.data.chat import ChatPrompts
from jaxrl.data.examples import Example
from jaxrl.data.prompts import PromptStream, encode_prompt, eval_prompts
from jaxrl.data.tokenizers import Tokenizer, load_tokenizer
from jaxrl.errors import DataError

CHARS = load_tokenizer("chars")


def examples(count):
    return [Example(f"question {i}", f"answer {i}", {"n": i}) for i in range(count)]


def test_prompt_stream_prompt_carries_text_tokens_reference_and_id():
    prompt = PromptStream(examples(1), CHARS, seed=0)[2]

    assert prompt.id == "train/e2/00000"
    assert prompt.index == 2
    assert prompt.text == "question 0"
    assert_array_equal(prompt.tokens, CHARS.encode("question 0"))
    assert prompt.tokens.dtype == np.int32
    assert prompt.reference == {
        "answer": "answer 0",
        "question": "question 0",
        "metadata": {"n": 0},
    }


def test_prompt_stream_every_epoch_has_all_prompts_in_another_order():
    stream = PromptStream(examples(20), CHARS, seed=3)

    epochs = [[stream[e * 20 + i].text for i in range(20)] for e in range(3)]

    assert stream.epoch_length == 20
    for epoch in epochs:
        assert sorted(epoch) == sorted(e.question for e in examples(20))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_prompt_stream_ids_are_unique_and_stable_over_construction():
    first, second = (PromptStream(examples(7), CHARS, seed=5) for _ in range(2))

    ids = [first[i].id for i in range(50)]

    assert len(set(ids)) == 50
    # Any place can be asked for, in any order.
    assert [second[i].id for i in reversed(range(50))] == ids[::-1]
    assert second[10**9].index == 10**9


def test_prompt_stream_seed_changes_the_order():
    first, second = (PromptStream(examples(30), CHARS, seed=seed) for seed in (1, 2))

    assert [first[i].text for i in range(30)] != [second[i].text for i in range(30)]


def test_prompt_stream_tokens_cannot_be_changed_by_accident():
    stream = PromptStream(examples(1), CHARS, seed=0)

    with pytest.raises(ValueError, match="read-only"):
        stream[0].tokens[0] = 5


def test_prompt_stream_negative_index_raises():
    with pytest.raises(IndexError, match="-1 must be at least 0"):
        PromptStream(examples(3), CHARS, seed=0)[-1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Example("", "a"), "the prompt of example 1 is empty"),
        (Example(" \n", "a"), "the prompt of example 1 is empty"),
        (Example("x" * 11, "a"), "example 1 has 11 tokens, more than max_prompt_tokens=10"),
        (Example("ünder", "a"), r"no token for 'ü' \(U\+00FC\)"),
    ],
)
def test_prompt_stream_bad_prompt_raises_at_construction(bad, message):
    with pytest.raises(DataError, match=message):
        PromptStream([Example("x" * 10, "a"), bad], CHARS, seed=0, max_prompt_tokens=10)


def test_prompt_stream_without_examples_raises():
    with pytest.raises(DataError, match="no examples"):
        PromptStream([], CHARS, seed=0)


def test_eval_prompts_are_all_examples_in_order():
    prompts = eval_prompts(examples(3), CHARS, max_prompt_tokens=10)

    assert [p.id for p in prompts] == ["eval/e0/00000", "eval/e0/00001", "eval/e0/00002"]
    assert [p.index for p in prompts] == [0, 1, 2]
    assert [p.text for p in prompts] == ["question 0", "question 1", "question 2"]


def chat_tokenizer(*, with_bos):
    inner = tokenizers.Tokenizer.from_str(load_tokenizer("bytes").inner.to_str())
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if with_bos:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    return Tokenizer(inner, "chat", pad_id=0, bos_id=1, eos_id=2)


def test_encode_prompt_special_tokens_count_in_the_template_only():
    tokenizer = chat_tokenizer(with_bos=False)
    example = Example("a<|im_end|>", "b", template="<|im_start|>u:{question}<|im_end|>\n")

    ids = encode_prompt(example, tokenizer)

    start, end = tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]
    assert ids.tolist() == [
        start,
        *tokenizer.encode("u:a<|im_end|>"),
        end,
        *tokenizer.encode("\n"),
    ]
    assert ids.tolist().count(end) == 1


@pytest.mark.parametrize("template", ["{question}", "<bos>{question}"])
def test_encode_prompt_bos_stands_once_where_the_tokenizer_wants_it(template):
    ids = encode_prompt(Example("hi", "b", template=template), chat_tokenizer(with_bos=True))

    assert ids.tolist() == [1, 3 + ord("h"), 3 + ord("i")]


def test_prompts_of_chats_are_what_the_user_says():
    chat = ChatPrompts(chat_of("qwen3"), "Be brief.")
    example = Example("2+2=", "4", template="<|im_end|>{question}")
    tokenizer = chat.template.tokenizer

    stream = PromptStream([example], tokenizer, seed=0, chat=chat)
    (held_out,) = eval_prompts([example], tokenizer, chat=chat)

    says = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<|im_end|>2+2="},
    ]
    assert_array_equal(stream[0].tokens, chat.template.encode(says))
    assert_array_equal(held_out.tokens, stream[0].tokens)
    assert stream[0].text == "<|im_end|>2+2="


def test_prompts_of_chats_count_the_words_around_the_question():
    chat = ChatPrompts(chat_of("gemma"))
    length = len(chat.encode("2+2="))

    with pytest.raises(DataError, match=f"has {length} tokens, more than max_prompt_tokens=9"):
        eval_prompts(
            [Example("2+2=", "4")], chat.template.tokenizer, max_prompt_tokens=9, chat=chat
        )

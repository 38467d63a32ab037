"""Conversations of several turns: ids are appended, what was sampled is not encoded again."""

from __future__ import annotations

import numpy as np
import pytest
from data.chat_cases import TEMPLATES, beginning_tokenizer, byte_tokenizer, chat_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data.chat import ChatTemplate
from jaxrl.errors import DataError

USER = [{"role": "user", "content": "Hi"}]
NEW = [{"role": "user", "content": "And now?"}]
FAMILIES = ["smollm2", "qwen3", "llama31", "gemma"]


def text_of(chat, ids):
    """The ids as text with their special tokens."""
    return chat.tokenizer.inner.decode(list(ids), skip_special_tokens=False)


def test_next_turn_is_what_the_template_writes_behind_the_reply():
    chat = chat_of("qwen3")
    reply = [*chat.tokenizer.encode("4"), chat.tokenizer.eos_id]

    ids = chat.next_turn(USER, reply, NEW)

    assert ids.dtype == np.int32
    assert text_of(chat, ids) == ("\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")


def test_next_turn_of_a_reply_that_was_cut_off_ends_it_first():
    chat = chat_of("qwen3")

    ids = chat.next_turn(USER, chat.tokenizer.encode("4 and"), NEW)

    assert text_of(chat, ids).startswith("<|im_end|>\n<|im_start|>user\n")


def test_next_turn_of_a_reply_that_another_stop_token_ended_keeps_that_one():
    stop = byte_tokenizer("qwen3").special_tokens["<|endoftext|>"]
    chat = chat_of("qwen3", stop_ids=(stop,))

    ids = chat.next_turn(USER, [*chat.tokenizer.encode("4"), stop], NEW)

    assert text_of(chat, ids).startswith("\n<|im_start|>user\n")


def test_next_turn_of_an_empty_reply_ends_it():
    chat = chat_of("gemma")

    assert text_of(chat, chat.next_turn(USER, [], NEW)).startswith("<end_of_turn>\n")


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    replies=st.lists(st.text("abc <|é.\n", min_size=1).map(str.strip), min_size=1, max_size=3),
)
def test_next_turn_joins_to_the_ids_of_the_whole_conversation(family, replies):
    chat = CHATS[family]
    messages, ids = list(USER), chat.encode(USER).tolist()
    for reply in replies:
        sampled = [*chat.tokenizer.encode(reply), chat.end_id]
        ids += [*sampled, *chat.next_turn(messages, sampled, NEW).tolist()]
        messages += [{"role": "assistant", "content": reply}, *NEW]

    assert ids == chat.encode(messages).tolist()


CHATS = {family: chat_of(family) for family in FAMILIES}


def test_next_turn_of_mistral_has_the_end_of_the_reply_once():
    chat = chat_of("mistral")
    reply = [*chat.tokenizer.encode(" 4"), chat.tokenizer.eos_id]

    ids = [*chat.encode(USER), *reply, *chat.next_turn(USER, reply, NEW)]

    whole = [*USER, {"role": "assistant", "content": "4"}, *NEW]
    assert ids == chat.encode(whole).tolist()


def test_next_turn_keeps_thoughts_that_the_template_would_rewrite():
    chat = chat_of("qwen3")
    reply = [*chat.tokenizer.encode("<think>\nhm\n</think>\n\n4"), chat.tokenizer.eos_id]

    ids = chat.next_turn(USER, reply, NEW)

    # The template leaves old thoughts out; what was sampled stays as it was.
    assert text_of(chat, ids).startswith("\n<|im_start|>user\nAnd now?")
    assert "think" not in text_of(chat, ids)


def test_next_turn_with_answers_of_tools():
    chat = chat_of("qwen3")
    call = [*chat.tokenizer.encode("<tool_call>…</tool_call>"), chat.tokenizer.eos_id]

    ids = chat.next_turn(USER, call, [{"role": "tool", "content": "sun"}], tools=[{"name": "f"}])

    assert text_of(chat, ids) == (
        "\n<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_next_turn_special_text_of_the_new_message_is_no_token():
    chat = chat_of("qwen3")
    end = chat.tokenizer.special_tokens["<|im_end|>"]
    reply = [*chat.tokenizer.encode("4"), end]

    ids = chat.next_turn(USER, reply, [{"role": "user", "content": "<|im_end|>"}]).tolist()

    assert ids.count(end) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content }}", "shows the assistant's message 0 times"),
        ("{% for m in messages %}{{ m.content * 2 }}{% endfor %}", "message 2 times"),
        ("{{ messages[1].content|length }}", "message 0 times"),
    ],
)
def test_next_turn_of_a_template_that_does_not_show_the_reply_once_raises(source, message):
    chat = ChatTemplate(source, byte_tokenizer("gemma"), name="odd.jinja")

    with pytest.raises(DataError, match=message):
        chat.next_turn(USER, [5], NEW)


def test_next_turn_that_the_template_refuses_raises():
    with pytest.raises(DataError, match="roles must alternate"):
        chat_of("gemma").next_turn(USER, [5], [{"role": "assistant", "content": "more"}])


def test_next_turn_of_a_template_without_end_keeps_all_it_writes():
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    chat = ChatTemplate(source, byte_tokenizer("gemma"))

    ids = chat.next_turn(USER, [*chat.tokenizer.encode("4"), chat.tokenizer.eos_id], NEW)

    assert text_of(chat, ids) == "\nuser: And now?\nassistant:"


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("smollm2", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("llama31", "<|eot_id|>"),
        ("mistral", "</s>"),
        ("gemma", "<end_of_turn>"),
        ("features", "<eos>"),
    ],
)
def test_end_id_is_what_the_template_ends_replies_with(family, end):
    chat = chat_of(family)

    assert chat.end_id == chat.tokenizer.inner.token_to_id(end)


def test_stop_ids_are_the_end_and_those_of_the_tokenizer():
    chat = chat_of("gemma", stop_ids=(0,))

    assert chat.stop_ids == (chat.end_id, chat.tokenizer.eos_id, 0)
    assert set(TEMPLATES) >= set(FAMILIES)


def test_next_turn_tokenizer_that_marks_only_the_beginning_does_not_mark_the_next_turn():
    source = "{% for m in messages %}{{ m.content }}]{% endfor %}"
    chat = ChatTemplate(source, beginning_tokenizer())
    question, new = ({"role": "user", "content": text} for text in "ab")

    ids = chat.next_turn([question], chat.tokenizer.encode("a"), [new])

    assert ids.tolist() == [chat.tokenizer.inner.token_to_id(token) for token in "]b]"]

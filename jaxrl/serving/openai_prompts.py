"""What is asked in requests of OpenAI's API, as token ids: prompts and conversations."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from jaxrl.data.specials import encode_pieces
from jaxrl.errors import DataError
from jaxrl.serving.backend import Backend
from jaxrl.serving.errors import FieldError
from jaxrl.serving.fields import Fields

MAX_PROMPTS = 128
"""The most prompts of one request."""

CHARACTERS_PER_TOKEN = 128
"""Longer texts are refused before they are encoded, which takes its time: the longest tokens of the
usual vocabularies are about that many spaces."""

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_prompts(fields: Fields, backend: Backend) -> list[np.ndarray]:
    """The field `prompt` as token ids int32 [P]: a text, a list of texts, a list of token ids, or a
    list of such lists."""
    value = fields.take("prompt")
    if isinstance(value, str):
        return [_encode_text(value, backend)]
    if not isinstance(value, list) or not value:
        kinds = "a text, a list of texts, a list of token ids, or a list of lists of token ids"
        raise FieldError(f"prompt must be {kinds}, and not be empty", "prompt")
    several = isinstance(value[0], str | list)
    prompts = value if several else [value]
    if len(prompts) > MAX_PROMPTS:
        raise FieldError(f"{len(prompts)} prompts: at most {MAX_PROMPTS} are allowed", "prompt")
    if isinstance(value[0], str):
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise FieldError("prompt holds texts and other things: all must be texts", "prompt")
        return [_encode_text(prompt, backend) for prompt in prompts]
    return [_token_ids(prompt, backend) for prompt in prompts]


def _token_ids(ids: Any, backend: Backend) -> np.ndarray:
    size = backend.driver.engine.model.config.vocab_size
    if not isinstance(ids, list) or not ids:
        raise FieldError("prompt must hold lists of token ids that are not empty", "prompt")
    for place, id_ in enumerate(ids):
        if not isinstance(id_, int) or isinstance(id_, bool) or not 0 <= id_ < size:
            shown = json.dumps(id_)[:40]
            rule = f"must be a whole number from 0 to {size - 1}"
            raise FieldError(f"token id {shown} at place {place} of a prompt {rule}", "prompt")
    return np.array(ids, np.int32)


def _encode_text(text: str, backend: Backend) -> np.ndarray:
    """A text as it is, special tokens and all, behind what the tokenizer wants before a text."""
    check_characters(len(text), backend, "prompt")
    tokenizer = backend.tokenizer
    prefix = list(tokenizer.prompt_prefix)
    ids = encode_pieces([(text, True)], tokenizer)
    # The text may begin with the bos itself.
    ids = ids if prefix and ids[: len(prefix)] == prefix else prefix + ids
    if not ids:
        raise FieldError("prompt is empty: it must hold something to complete", "prompt")
    return np.array(ids, np.int32)


def check_characters(characters: int, backend: Backend, field: str) -> None:
    """Raise `FieldError` for a text that is too long for the context, whatever it says."""
    most = CHARACTERS_PER_TOKEN * backend.driver.engine.max_length
    if characters > most:
        raise FieldError(
            f"{field} has {characters} characters: the context holds at most {most}",
            field,
            "context_length_exceeded",
        )


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The field `messages`, each with role and content as text, as templates read them."""
    value = fields.take("messages")
    if not isinstance(value, list) or not value:
        raise FieldError("messages must be a list of at least one message", "messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise FieldError(f"{where} must be an object with role and content", where)
    fields = Fields(message, where)
    role = fields.text("role")
    if role not in ROLES:
        raise fields.error("role", f"{role[:40]!r} must be one of {', '.join(ROLES)}")
    content = _content(fields)
    name = fields.text("name")
    fields.finish(["refusal"])
    # What OpenAI calls developer now was system before, and templates know only that.
    known = {"role": "system" if role == "developer" else role, "content": content}
    return {**known, "name": name} if name else known


def _content(fields: Fields) -> str:
    """A text, or the texts of a list of parts."""
    value = fields.take("content")
    if isinstance(value, str):
        return value
    where = fields.name("content")
    if not isinstance(value, list):
        raise FieldError(f"{where} must be a text or a list of texts", where)
    texts = []
    for place, part in enumerate(value):
        inner = f"{where}[{place}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            raise FieldError(f'{inner} must be {{"type": "text", "text": …}}', inner)
        fields = Fields(part, inner)
        texts.append(fields.text("text"))
        fields.finish(["type"])
    return "".join(texts)


def encode_chat(backend: Backend, messages: list[dict[str, Any]]) -> np.ndarray:
    """Token ids int32 [P] of the conversation, up to where the assistant answers.

    As the model was trained to be asked: with the system prompt of its run, unless the client
    brings one. Raises `FieldError` for what the template refuses.
    """
    chat = backend.chat
    longest = backend.driver.engine.max_length
    if len(messages) > longest:
        # Empty ones, too, take their time in a template, and a token each at the least.
        raise FieldError(
            f"{len(messages)} messages: the context holds at most {longest} tokens",
            "messages",
            "context_length_exceeded",
        )
    characters = sum(len(m["content"]) + len(m.get("name", "")) for m in messages)
    check_characters(characters, backend, "messages")
    if chat.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": chat.system}, *messages]
    try:
        return chat.template.encode(messages, **chat.variables)
    except DataError as error:
        raise FieldError(str(error), "messages") from None

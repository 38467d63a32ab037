"""Chats: messages to text and token ids, with the template that the model was trained with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config.gguf_header import is_gguf
from jaxrl.data import chat_messages, model_files
from jaxrl.data.chat_sandbox import compile_template, render_template
from jaxrl.data.gguf_tokenizer import gguf_chat_template
from jaxrl.data.specials import Piece, encode_pieces
from jaxrl.data.tokenizers import BUILT_IN, Tokenizer
from jaxrl.errors import DataError

Message = Mapping[str, Any]
"""A role ("system", "user", "assistant", "tool"), its content, and what else the template reads."""

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of the functions that the model may call."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A jinja template, as published with the model, and the tokenizer it belongs to.

    `tool_source` takes the place of `source` when tools are given; `name` is where they are from.
    The text is what transformers makes of the same messages. Special tokens are tokens where the
    template writes them, and plain characters where a message or a tool does.

    >>> chat.render([{"role": "user", "content": "Hi"}])  # doctest: +SKIP
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """

    source: str
    tokenizer: Tokenizer
    tool_source: str | None = None
    name: str = "chat template"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation, by default up to where the assistant answers.

        `variables` are the template's own (`enable_thinking=False`). Raises `DataError` for
        messages that are no JSON values, and for whatever the template raises.
        """
        pieces = self._pieces(messages, tools, add_generation_prompt, variables)
        return "".join(text for text, _ in pieces)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> np.ndarray:
        """Token ids int32 [P] of what `render` gives. A bos is there if the template writes it."""
        pieces = self._pieces(messages, tools, add_generation_prompt, variables)
        return np.array(encode_pieces(pieces, self.tokenizer), np.int32)

    def next_turn(
        self,
        messages: Sequence[Message],
        reply_ids: Sequence[int] | np.ndarray,
        new_messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        **variables: Any,
    ) -> np.ndarray:
        """Token ids int32 [N] to append to a reply, so that the assistant can answer once more.

        `messages` is the conversation before the reply, `reply_ids` [R] what was sampled (with the
        token that ended it, unless it was cut off), `new_messages` what was said since. Neither the
        conversation nor the reply is encoded again: the ids are what the template writes behind
        the assistant's message. Raises `DataError` where it does not show that message once.
        """
        conversation = [*messages, {"role": "assistant"}, *new_messages]
        ids = self._encode_behind(conversation, len(messages), tools, True, variables)
        if len(reply_ids) and int(reply_ids[-1]) in self.stop_ids:
            ids = ids[self._end_of(ids) :]
        return np.array(ids, np.int32)

    @functools.cached_property
    def end_id(self) -> int:
        """The token that ends the assistant's message, in this template.

        That of the tokenizer, unless the template writes another special token there: for some
        models eos ends texts, and messages end otherwise.
        """
        conversation = [{"role": "user", "content": "a"}, {"role": "assistant"}]
        ids = self._encode_behind(conversation, 1, None, False, {})
        first = self._first_special(ids)
        return self.tokenizer.eos_id if first is None else ids[first]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens at which sampling stops: `end_id` and those of the tokenizer."""
        return tuple(dict.fromkeys((self.end_id, *self.tokenizer.stop_ids)))

    def check(self) -> None:
        """Raise `DataError` for a template that cannot be compiled."""
        for source in filter(None, (self.source, self.tool_source)):
            compile_template(source, self.name)

    def _pieces(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        behind: int | None = None,
    ) -> list[Piece]:
        """What the template writes, in pieces: its own, and special tokens in other people's text.

        With `behind`: only what follows the content of that message, which is left open.
        """
        source = self.source if tools is None or self.tool_source is None else self.tool_source
        chat = chat_messages.Hidden(self.tokenizer, source, messages, tools, variables)
        if behind is not None:
            chat.messages[behind]["content"] = chat.mark
        text = render_template(
            compile_template(source, self.name),
            {
                "tools": chat.tools,
                "documents": None,
                **self.tokenizer.role_tokens,
                **chat.variables,
                "messages": chat.messages,
                "add_generation_prompt": add_generation_prompt,
            },
            name=self.name,
        )
        if behind is not None:
            if text.count(chat.mark) != 1:
                raise DataError(
                    f"{self.name}: the template shows the assistant's message "
                    f"{text.count(chat.mark)} times, so what follows it cannot be told"
                )
            text = text.partition(chat.mark)[2]
        return chat.restored(text)

    def _encode_behind(
        self,
        conversation: Sequence[Message],
        index: int,
        tools: Tools | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> list[int]:
        """Ids of what the template writes behind message `index`."""
        pieces = self._pieces(conversation, tools, add_generation_prompt, variables, index)
        return encode_pieces(pieces, self.tokenizer, continues=True)

    def _first_special(self, ids: Sequence[int]) -> int | None:
        """Place of the first special token, if nothing but white space is before it."""
        special = self.tokenizer.special_ids
        first = next((i for i, id_ in enumerate(ids) if id_ in special), None)
        if first is None or self.tokenizer.decode(ids[:first]).strip():
            return None
        return first

    def _end_of(self, ids: Sequence[int]) -> int:
        """How many ids the template spends on ending the message: a sampled end replaces them."""
        first = self._first_special(ids)
        return 0 if first is None or ids[first] not in self.stop_ids else first + 1


@dataclasses.dataclass(frozen=True)
class ChatPrompts:
    """How the prompts of a run are asked: what the system says, then the prompt as the user."""

    template: ChatTemplate
    system: str = ""
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def messages(self, text: str) -> list[Message]:
        """The conversation that asks `text`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": text}]

    def encode(self, text: str) -> np.ndarray:
        """Token ids int32 [P] of the conversation, up to where the assistant answers."""
        return self.template.encode(self.messages(text), **self.variables)

    def encode_reply(self, text: str) -> list[int]:
        """Token ids of what the assistant answers, and of the token that ends its message."""
        ids = encode_pieces([(text, False)], self.template.tokenizer, continues=True)
        return [*ids, self.template.end_id]


def load_chat_template(spec: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a model: `spec` is its folder, its tokenizer.json, or a GGUF file.

    In a folder it is chat_template.jinja, or `chat_template` in tokenizer_config.json: a text, or
    a list with the names "default" and "tool_use". Raises `DataError` that says where it was
    looked for, and for a template that cannot be compiled.
    """
    path = Path(spec)
    if is_gguf(spec):
        source = gguf_chat_template(spec)
        templates = {} if source is None else {"default": source}
        name, looked = spec, f"tokenizer.chat_template in the metadata of {spec}"
    elif spec not in BUILT_IN and path.exists():
        folder = path if path.is_dir() else path.parent
        templates = model_files.chat_templates(folder)
        name = str(model_files.chat_file(folder))
        looked = f"{folder / model_files.CHAT}, chat_template in {folder / model_files.CONFIG}"
    else:
        templates, name = dict(tokenizer.chat_templates), f"tokenizer {spec}"
        looked = f"the tokenizer {spec!r}, which has none; use the folder of a chat model"
    if "default" not in templates:
        others = f" (there are only: {', '.join(sorted(templates))})" if templates else ""
        raise DataError(f"no chat template: looked for {looked}{others}")
    chat = ChatTemplate(templates["default"], tokenizer, templates.get("tool_use"), name)
    chat.check()
    return chat

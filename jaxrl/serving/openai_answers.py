"""Answers of OpenAI's API, whole or in chunks, with the versions of the weights in each."""

from __future__ import annotations

import abc
import secrets
import time
from collections.abc import Sequence
from typing import Any

from jaxrl.data.streaming import TextDecoder
from jaxrl.serving.backend import Backend
from jaxrl.serving.generation import Piece
from jaxrl.serving.openai_requests import Ask
from jaxrl.serving.token_texts import TokenTexts
from jaxrl.serving.weights_reply import version_object


class Answer(abc.ABC):
    """The answer to one request: pieces in, the objects of OpenAI's API out.

    Subclasses say how completions and chats differ.
    """

    id_prefix = whole_kind = chunk_kind = ""

    def __init__(self, backend: Backend, ask: Ask, texts: TokenTexts):
        self._backend, self._ask, self._texts = backend, ask, texts
        self._choices = [_Choice(index, ask) for index in range(len(ask.prompts) * ask.n)]
        self._id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def add(self, index: int, piece: Piece) -> None:
        """A piece of choice `index`, for the whole."""
        self._choices[index].add(piece)

    def take(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """A piece of choice `index` -> its chunk; None if there is nothing to show yet."""
        choice = self._choices[index]
        first, offset = not choice.tokens, len(choice.tokens)
        choice.add(piece)
        shows_tokens = self._ask.logprobs is not None or self._ask.token_ids
        quiet = not piece.text and not (shows_tokens and piece.tokens)
        if quiet and not first and piece.finish_reason is None:
            return None
        # A piece without tokens shows text of those before it.
        versions = piece.versions or choice.versions[-1:]
        shown = {
            "index": index,
            **self._delta(piece.text, first=first),
            **self._details(choice, piece, offset, first=first),
            "finish_reason": piece.finish_reason,
        }
        return self._object(self.chunk_kind, [shown], versions) | self._no_usage()

    def whole(self) -> dict[str, Any]:
        """Everything that has come, as one object."""
        shown = []
        for choice in self._choices:
            everything = choice.piece()
            shown.append(
                {
                    "index": choice.index,
                    **self._message(everything.text),
                    **self._details(choice, everything, 0, first=True),
                    "finish_reason": everything.finish_reason,
                    "weight_version": self._versions(choice.versions),
                }
            )
        versions = sorted(v for choice in self._choices for v in choice.versions)
        return self._object(self.whole_kind, shown, versions) | {"usage": self._usage()}

    def usage_chunk(self) -> dict[str, Any] | None:
        """The last chunk, with the counts, if the client asked for one."""
        if not self._ask.include_usage:
            return None
        versions = sorted(v for choice in self._choices for v in choice.versions)
        return self._object(self.chunk_kind, [], versions) | {"usage": self._usage()}

    def _object(self, kind: str, choices: list[Any], versions: Sequence[int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._backend.name,
            "system_fingerprint": str(self._backend.version(versions[-1])),
            "weight_version": self._versions(versions),
            "weight_versions": [
                version_object(self._backend.version(number)) for number in sorted({*versions})
            ],
            "choices": choices,
        }

    def _versions(self, versions: Sequence[int]) -> dict[str, Any]:
        """The versions of the first and of the last token."""
        first, last = (self._backend.version(number) for number in (versions[0], versions[-1]))
        return {"first": version_object(first), "last": version_object(last)}

    def _details(
        self, choice: _Choice, piece: Piece, offset: int, *, first: bool
    ) -> dict[str, Any]:
        """What is told of the tokens of a piece, the first of which is token `offset`."""
        details: dict[str, Any] = {"logprobs": None}
        if self._ask.logprobs is not None and piece.tokens:
            details["logprobs"] = self._logprobs(choice, piece, offset)
        if first:
            details["seed"] = self._ask.seed(choice.index)
        if self._ask.token_ids:
            details["token_ids"] = piece.tokens
            if first:
                prompt = self._ask.prompts[choice.index // self._ask.n]
                details["prompt_token_ids"] = prompt.tolist()
        return details

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._ask.prompts))
        completion = sum(len(choice.tokens) for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _no_usage(self) -> dict[str, None]:
        return {"usage": None} if self._ask.include_usage else {}

    @abc.abstractmethod
    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        """How a chunk shows text."""

    @abc.abstractmethod
    def _message(self, text: str) -> dict[str, Any]:
        """How a whole answer shows text."""

    @abc.abstractmethod
    def _logprobs(self, choice: _Choice, piece: Piece, offset: int) -> dict[str, Any]:
        """How the log-probabilities of a piece are shown, the first token of which is `offset`."""


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    id_prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        return {"text": text}

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, choice: _Choice, piece: Piece, offset: int) -> dict[str, Any]:
        label = self._texts.label
        rows = zip(piece.tokens, piece.logprobs, piece.top, strict=True)
        return {
            "tokens": [label(token) for token in piece.tokens],
            "token_logprobs": piece.logprobs,
            "top_logprobs": [self._top(*row) for row in rows] if self._ask.logprobs else None,
            "text_offset": choice.offsets(self._texts, offset, offset + len(piece.tokens)),
            "versions": piece.versions,
        }

    def _top(
        self, token: int, logprob: float, alternatives: list[tuple[int, float]]
    ) -> dict[str, float]:
        """The alternatives by their texts, and the sampled token, as in OpenAI's answers."""
        shown: dict[str, float] = {}
        for id_, value in [*alternatives, (token, logprob)]:
            # Where two tokens look the same, the likelier one is shown.
            shown.setdefault(self._texts.label(id_), value)
        return shown


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    id_prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, choice: _Choice, piece: Piece, offset: int) -> dict[str, Any]:
        content = [
            {
                **self._token(token, logprob),
                "top_logprobs": [self._token(*alternative) for alternative in top],
                "version": version,
            }
            for token, logprob, version, top in zip(
                piece.tokens, piece.logprobs, piece.versions, piece.top, strict=True
            )
        ]
        return {"content": content, "refusal": None}

    def _token(self, id_: int, logprob: float) -> dict[str, Any]:
        text, raw = self._texts.of(id_)
        shown = None if raw is None else list(raw)
        return {"token": text, "logprob": logprob, "bytes": shown}


class _Choice:
    """What has come of one completion."""

    def __init__(self, index: int, ask: Ask):
        self.index = index
        self._stop_tokens = frozenset(ask.params.stop_tokens)
        self._pieces: list[Piece] = []
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self._decoder: TextDecoder | None = None
        self._characters = 0

    def add(self, piece: Piece) -> None:
        """One more piece."""
        self._pieces.append(piece)
        self.tokens += piece.tokens
        self.versions += piece.versions

    def piece(self) -> Piece:
        """Everything as one piece."""
        pieces = self._pieces
        return Piece(
            "".join(piece.text for piece in pieces),
            self.tokens,
            [logprob for piece in pieces for logprob in piece.logprobs],
            self.versions,
            [top for piece in pieces for top in piece.top],
            pieces[-1].finish_reason,
        )

    def offsets(self, texts: TokenTexts, start: int, end: int) -> list[int]:
        """Where the tokens `start` to `end` begin, in characters; asked for once, in order."""
        if self._decoder is None:
            self._decoder = TextDecoder(texts.tokenizer)
        found = []
        for token in self.tokens[start:end]:
            found.append(self._characters)
            if token not in self._stop_tokens:
                self._characters += len(self._decoder.push([token]))
        return found

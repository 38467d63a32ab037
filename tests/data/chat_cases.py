"""Templates like the published ones, conversations, and tokenizers that know their tokens."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from jaxrl.data.chat import ChatTemplate
from jaxrl.data.tokenizers import Tokenizer, load_tokenizer

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
}

ROLES = {
    "smollm2": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    "qwen3": {"eos_token": "<|im_end|>"},
    "llama31": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "features": {"eos_token": "<eos>"},
}

SPECIAL = {
    "smollm2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama31": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    "mistral": ["<s>", "</s>"],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "features": [],
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <eine> Stadt",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}

CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}},
}

CONVERSATIONS = {
    "question": [{"role": "user", "content": "What is 2+2?"}],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "  Hi\nthere  "},
    ],
    "rounds": [
        {"role": "user", "content": "One, \U0001f600 zwei"},
        {"role": "assistant", "content": " Three.\n"},
        {"role": "user", "content": "Four?"},
        {"role": "assistant", "content": "Five"},
    ],
    "thoughts": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "new", "tool_calls": None},
    ],
    "tools": [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": true}', "name": "weather"},
        {"role": "tool", "content": "again", "name": "weather"},
    ],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        {"role": "user", "content": [{"type": "text", "text": "d"}]},
    ],
}


def byte_tokenizer(family: str, *, added: tuple[str, ...] = (), **changes) -> Tokenizer:
    """Bytes, the special tokens of a family, and its roles; `added` are tokens, but not special."""
    roles = ROLES[family]
    inner = tokenizers.Tokenizer.from_str(load_tokenizer("bytes").inner.to_str())
    inner.add_special_tokens(SPECIAL[family])
    inner.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
    bos = roles.get("bos_token")
    settings = {
        "pad_id": 0,
        "eos_id": inner.token_to_id(roles["eos_token"]),
        "bos_id": None if bos is None else inner.token_to_id(bos),
        "role_tokens": roles,
    }
    return Tokenizer(inner, family, **(settings | changes))


def chat_of(family: str, **changes) -> ChatTemplate:
    """The template of a family with such a tokenizer."""
    tokenizer = byte_tokenizer(family, **changes)
    return ChatTemplate(TEMPLATES[family], tokenizer, name=f"{family}.jinja")


def beginning_tokenizer() -> Tokenizer:
    """Characters, with a mark of a space before the first text and nowhere else."""
    names = ["<s>", "</s>", "\u2581", "\n", *"ab[]</s>"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({name: i for i, name in enumerate(dict.fromkeys(names))}, [])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(inner, "beginning", pad_id=0, eos_id=1, bos_id=0)

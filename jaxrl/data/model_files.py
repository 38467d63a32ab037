"""What the folder of a published model says beside its tokenizer: roles, stops, chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.config.gguf_header import is_gguf, read_header
from jaxrl.errors import DataError

if TYPE_CHECKING:
    import tokenizers

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
CHAT, MORE_CHATS = "chat_template.jinja", "additional_chat_templates"

GGUF_CHAT = "tokenizer.chat_template"
"""Key of the template in the metadata of a GGUF file."""

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def role_tokens(folder: Path) -> dict[str, str]:
    """ "bos_token", "eos_token", … -> text, as tokenizer_config.json declares them.

    Raises `DataError` for one that is neither a text nor null.
    """
    content = _record(folder / CONFIG)
    roles = {}
    for role in (f"{name}_token" for name in _ROLES):
        token = content.get(role)
        # Older files hold a record with the text in "content".
        text = token.get("content", token) if isinstance(token, dict) else token
        if isinstance(text, str):
            roles[role] = text
        elif token is not None:
            rule = "must be a text, or a record with a text in 'content'"
            raise DataError(f"{folder / CONFIG}: {role}={token!r:.60} {rule}")
    return roles


def stop_ids(folder: Path, inner: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The ids that end a completion: eos_token_id of generation_config.json, a number or a list.

    Raises `DataError` for something that is no id of the vocabulary.
    """
    path = folder / GENERATION
    given = _record(path).get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for id_ in ids:
        # Ids are numbers of 32 bits.
        if type(id_) is not int or not 0 <= id_ < 2**32 or inner.id_to_token(id_) is None:
            raise DataError(f"{path}: eos_token_id={given!r} holds {id_!r}, which is no token id")
    return tuple(ids)


def write_stop_ids(folder: Path, ids: Sequence[int]) -> None:
    """Write generation_config.json, or only its eos_token_id where the file is there."""
    path = folder / GENERATION
    content = {**_record(path), "eos_token_id": list(ids)}
    path.write_text(json.dumps(content), encoding="utf-8")


def has_chat_template(spec: str) -> bool:
    """Whether the model in the folder or GGUF file `spec` says how it is asked."""
    if is_gguf(spec):
        return isinstance(read_header(spec, DataError).metadata.get(GGUF_CHAT), str)
    return "default" in chat_templates(Path(spec))


def chat_templates(folder: Path) -> dict[str, str]:
    """Name -> source. "default" is the one of chat_template.jinja, before that of
    tokenizer_config.json (a text, or a list of names and texts)."""
    path = folder / CONFIG
    found = _listed(_record(path).get("chat_template"), path)
    if (folder / CHAT).is_file():
        found["default"] = _text(folder / CHAT)
    for path in sorted((folder / MORE_CHATS).glob("*.jinja")):
        found[path.stem] = _text(path)
    return found


def chat_file(folder: Path) -> Path:
    """The file that the default template of `folder` stands in."""
    return folder / (CHAT if (folder / CHAT).is_file() else CONFIG)


def write_chat_templates(folder: Path, templates: Mapping[str, str]) -> None:
    """Write chat_template.jinja, and the others below additional_chat_templates."""
    for name, source in templates.items():
        path = folder / (CHAT if name == "default" else f"{MORE_CHATS}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(source)


def _listed(value: Any, path: Path) -> dict[str, str]:
    """The templates of the key chat_template."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    named = {}
    for entry in entries:
        if isinstance(entry, dict) and all(isinstance(entry.get(k), str) for k in _ENTRY):
            named[entry["name"]] = entry["template"]
    if not entries or len(named) != len(entries) or not all(map(_is_plain, named)):
        raise DataError(
            f"{path}: chat_template must be a text, or a list of records with name and template; "
            f"it is {str(value)[:60]!r}"
        )
    return named


_ENTRY = ("name", "template")


def _is_plain(name: str) -> bool:
    """A name that may be part of a path."""
    return name.replace("-", "_").isidentifier()


def _text(path: Path) -> str:
    try:
        # As it stands: a template may write \r\n.
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _record(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} must be a JSON object")
    return content

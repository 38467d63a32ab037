"""Examples from a file with one JSON record a line, plain or gzipped."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxrl.data.examples import Example, Split, check_template
from jaxrl.errors import DataError

if TYPE_CHECKING:
    from jaxrl.config import DataConfig

AnswerFormat = Literal["auto", "plain", "gsm8k"]

ANSWER_MARK = "####"
"""GSM8K writes the solution and then `#### 42`: the answer is what follows the last mark."""


_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


def read_split(config: DataConfig, split: Split) -> list[Example]:
    """Examples of one split of `config.path`. Raises `DataError`; see `load_examples`.

    Both splits come from the one file, by the hash of seed and prompt: the held-out prompts are the
    same whatever `train_size` is, and lines that are added or moved change few of them.
    """
    examples = read_jsonl(
        config.path, template=config.prompt_template, answer_format=config.answer_format
    )
    held_out: dict[str, Example] = {}
    for example in sorted(examples, key=_by_hash(config.eval_seed)):
        if len(held_out) < config.eval_size:
            held_out.setdefault(example.prompt, example)
    rest = [example for example in examples if example.prompt not in held_out]
    if len(held_out) < config.eval_size or len(rest) < config.train_size:
        raise DataError(
            f"{config.path} has {len(examples)} examples: with {len(held_out)} different prompts "
            f"held out (data.eval_size={config.eval_size}), {len(rest)} are left for "
            f"data.train_size={config.train_size}; lower one of the two"
        )
    if split == "eval":
        return list(held_out.values())
    return sorted(rest, key=_by_hash(config.train_seed))[: config.train_size]


def read_jsonl(
    path: str | Path, *, template: str = "{question}", answer_format: AnswerFormat = "auto"
) -> list[Example]:
    """All examples of a file whose records have `question` and `answer`; other keys are metadata.

    An answer may be text or a number. With "auto", `… #### 42` gives the answer "42", and the whole
    text as metadata `solution`. With "gsm8k" every answer must be like that; commas between
    thousands are left out, and the whole text is the target of supervised training. With "plain"
    the mark means nothing. Empty lines are skipped. Raises `DataError` with file and line number.
    """
    path = Path(path)
    examples = [
        _example(_record(line, f"{path}:{number}"), f"{path}:{number}", template, answer_format)
        for number, line in _lines(path)
        if line.strip()
    ]
    if not examples:
        raise DataError(f"{path} has no examples")
    check_template(template, examples)
    return examples


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        place = f" after line {number}" if number else ""
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read{place}: {reason}") from None


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        # utf-8-sig: some editors put a mark before the first record.
        record = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if b"\\u" in line:
            # Half of a surrogate pair is no character, but JSON can write it.
            json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a JSON record: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a record must be a JSON object, got {type(record).__name__}")
    return record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _example(record: dict[str, Any], where: str, template: str, form: AnswerFormat) -> Example:
    for key in ("question", "answer"):
        if key not in record:
            raise DataError(f"{where}: no {key!r}; the record has {sorted(record)}")
    question, answer = record.pop("question"), record.pop("answer")
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: 'question' must be a text that is not empty, got {question!r}")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(f"{where}: 'answer' must be a text or a number, got {answer!r}")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise DataError(f"{where}: 'answer' must be a finite number, got {answer!r}")
    text = answer = str(answer)
    marked = ANSWER_MARK in text
    if form == "gsm8k" and not marked:
        raise DataError(
            f"{where}: 'answer' must hold {ANSWER_MARK} and then the answer, because of "
            f"data.answer_format='gsm8k'; got {text[:60]!r}"
        )
    if marked and form != "plain":
        record["solution"] = text
        answer = text.rpartition(ANSWER_MARK)[2].strip()
    if form == "gsm8k":
        answer = _THOUSANDS.sub("", answer)
    if not answer.strip():
        raise DataError(f"{where}: 'answer' is empty")
    return Example(question, answer, record, template, text if form == "gsm8k" else "")


def _by_hash(seed: int) -> Callable[[Example], bytes]:
    """Sort key: an order that depends on seed and prompt only, the same on every machine."""
    return lambda example: hashlib.sha256(f"{seed}:{example.prompt}".encode()).digest()

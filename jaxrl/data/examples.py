"""Examples: a question, its answer, and the template that makes a prompt of them."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jaxrl.errors import DataError

if TYPE_CHECKING:
    from jaxrl.config import DataConfig

Split = Literal["train", "eval"]


@dataclasses.dataclass(frozen=True)
class Example:
    """One question with its one right answer.

    `target` is the text that supervised training teaches, where that is more than the answer.
    `metadata` is what the source says besides; it holds plain values only (text, numbers, lists,
    mappings) and MAY GIVE THE ANSWER AWAY (reasoning-gym's often does, and the `solution` of a
    jsonl answer does): it goes to the scorer, and into the prompt only where `template` names it.
    """

    question: str
    answer: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template: str = "{question}"
    target: str = ""

    @property
    def demonstration(self) -> str:
        """What a model is to write: `target`, or else the answer."""
        return self.target or self.answer

    def pieces(self) -> list[tuple[str, bool]]:
        """The prompt as (text, whether the text stands in the template itself) pairs."""
        pieces = []
        for literal, name, spec, conversion in string.Formatter().parse(self.template):
            if literal:
                pieces.append((literal, True))
            if name is not None:
                field = f"{{{name}{'!' + conversion if conversion else ''}:{spec}}}"
                pieces.append((self._format(field), False))
        return pieces

    @property
    def prompt(self) -> str:
        """The text of the prompt. Raises `DataError` if the template does not fit the fields."""
        return "".join(text for text, _ in self.pieces())

    def _format(self, field: str) -> str:
        try:
            return field.format(**{**self.metadata, "question": self.question})
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"prompt_template={self.template!r} does not fit an example: "
                f"{type(error).__name__}: {error}"
            ) from None


def load_examples(config: DataConfig, split: Split) -> list[Example]:
    """The training or the held-out examples that `config` describes; always the same ones.

    No held-out prompt occurs in training, and there are exactly `train_size` and `eval_size`.
    Raises `DataError` with the counts if the source does not have that many.
    """
    if split not in ("train", "eval"):
        raise DataError(f"split={split!r} must be 'train' or 'eval'")
    # The readers import Example from here, and one of them needs an optional package.
    if config.source == "reasoning_gym":
        from jaxrl.data.reasoning_gym import read_split
    else:
        from jaxrl.data.jsonl import read_split
    return read_split(config, split)


def template_fields(template: str) -> list[str]:
    """Names of the fields in braces. Raises `DataError` for a template that is no format string."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise DataError(f"prompt_template={template!r} is not a format string: {error}") from None
    names = [name for _, name, _, _ in parsed if name is not None]
    for name in names:
        if not name.isidentifier():
            raise DataError(
                f"prompt_template={template!r}: {{{name}}} must be the plain name of a field; "
                "write {{ and }} for braces"
            )
    return names


def check_template(template: str, examples: Sequence[Example]) -> None:
    """Raise `DataError` if `template` names unknown fields, none at all, or gives the answer away.

    A metadata field that equals the answer in every example is refused. That finds plain copies
    only: whoever names metadata in a template must know what it holds.
    """
    names = template_fields(template)
    known = set.intersection(*({"question", *e.metadata} for e in examples)) - {"answer"}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise DataError(
            f"prompt_template={template!r}: no field {unknown[0]!r}; "
            f"the examples have {', '.join(sorted(known))}"
        )
    if not names:
        raise DataError(f"prompt_template={template!r} must name a field, such as {{question}}")
    for name in set(names) - {"question"}:
        if len(examples) > 1 and all(str(e.metadata[name]) == e.answer for e in examples):
            raise DataError(
                f"prompt_template={template!r}: {{{name}}} is the answer in every example"
            )


def plain(value: Any) -> Any:
    """`value` reduced to text, numbers, None, lists and mappings; other things become text.

    What travels to the reward processes must be cheap to send and need no import to read.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [plain(item) for item in items]
    return str(value)

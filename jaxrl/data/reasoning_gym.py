"""Examples from reasoning-gym's generators (the extra `tasks`).

Only questions and answers are taken: the package's scorers give partial credit for substrings, and
some evaluate text of the model as Python. Answers are compared by `jaxrl.rewards` instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxrl.data.examples import Example, Split, check_template, plain
from jaxrl.errors import DataError

if TYPE_CHECKING:
    from jaxrl.config import DataConfig

EVAL_SEEDS = 2**31
"""Where the seeds of evaluation begin; those of training lie below.

Item i of seed s is item i + k of seed s - k, so neighbouring seeds share most of their items."""

HASH_DEPENDENT = frozenset(
    {"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Tasks whose items change with PYTHONHASHSEED, which Python draws anew for each process."""

UNSUPPORTED = {
    "codeio": "some of its items differ between runs of the same seed",
    "list_functions": "some of its items differ between runs of the same seed",
    "knight_swap": "its items differ between runs of the same seed",
    "composite": "whether its parts give the same items in every run cannot be checked",
}


def read_split(config: DataConfig, split: Split) -> list[Example]:
    """Examples of one split of `config.task`. Raises `DataError`; see `load_examples`."""
    if config.train_seed + config.train_size > EVAL_SEEDS:
        raise DataError(
            f"data.train_seed={config.train_seed} + data.train_size={config.train_size} must be at "
            f"most {EVAL_SEEDS}, where the seeds of evaluation begin"
        )
    train = list(_generate(config, config.train_seed, config.train_size))
    check_template(config.prompt_template, train)
    if split == "train":
        return train
    # Small tasks repeat themselves: look further than eval_size, but not for ever.
    tries = 20 * config.eval_size + 1000
    candidates = _generate(config, EVAL_SEEDS + config.eval_seed, tries)
    seen = {example.prompt for example in train}
    held_out: list[Example] = []
    for example in candidates:
        if example.prompt not in seen:
            seen.add(example.prompt)
            held_out.append(example)
            if len(held_out) == config.eval_size:
                return held_out
    raise DataError(
        f"task {config.task!r} has only {len(held_out)} different prompts outside the "
        f"{config.train_size} training examples among {tries} that were generated, but "
        f"data.eval_size={config.eval_size}: lower data.train_size or data.eval_size, or widen "
        f"data.task_options={dict(config.task_options)}"
    )


def _generate(config: DataConfig, seed: int, size: int) -> Iterator[Example]:
    """`size` examples of one seed, made one by one."""
    dataset = _open(config.task, config.task_options, seed, size)
    for index in range(size):
        try:
            # By index: iterating over a dataset shares its position among all who do.
            item = dataset[index]
        except Exception as error:
            raise DataError(
                f"task {config.task!r} failed to make item {index} of seed {seed} with "
                f"task_options={dict(config.task_options)}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(item["answer"], str):
            raise DataError(
                f"task {config.task!r} has no single right answer to compare with: "
                f"its answer is {item['answer']!r}"
            )
        yield Example(
            item["question"], item["answer"], plain(item["metadata"]), config.prompt_template
        )


def _open(task: str, options: Mapping[str, Any], seed: int, size: int) -> Any:
    """The dataset object of a task, with everything about it checked."""
    package = _import_package()
    registry = package.factory.DATASETS
    if task not in registry:
        close = difflib.get_close_matches(task, registry, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else _some_of(registry)
        raise DataError(f"task={task!r} is not a reasoning-gym task; {hint}")
    if task in UNSUPPORTED:
        raise DataError(f"task={task!r} is not supported: {UNSUPPORTED[task]}")
    if task in HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") in ("", "random"):
        raise DataError(
            f"task={task!r} gives other items in every process unless Python's hash seed is fixed: "
            "set PYTHONHASHSEED=0 in the environment before Python starts"
        )
    _check_options(task, options, registry[task][1])
    try:
        return package.create_dataset(task, seed=seed, size=size, **options)
    except Exception as error:
        # Rules of the tasks are assertions, some of them without words.
        raise DataError(
            f"task {task!r} refuses task_options={dict(options)}: {type(error).__name__}: {error}"
        ) from error


def _import_package() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            "data.source='reasoning_gym' needs the package reasoning-gym: "
            f"pip install 'jaxrl[tasks]' ({error})"
        ) from error
    return reasoning_gym


def _check_options(task: str, options: Mapping[str, Any], config_class: type) -> None:
    names = {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}
    for name in options:
        if name in ("seed", "size"):
            raise DataError(
                f"task_options may not hold {name!r}: data.train_{name} and data.eval_{name} say it"
            )
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise DataError(
                f"task {task!r} has no option {name!r}; {hint}it has {', '.join(sorted(names))}"
            )


def _some_of(registry: Mapping[str, Any]) -> str:
    names = sorted(name for name in registry if not name.startswith("."))
    return f"there are {len(names)}, such as {', '.join(names[:: max(1, len(names) // 6)][:6])}"

"""Generated tasks: held-out prompts, errors, and the same examples in every process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types

import pytest

from jaxrl.config import DataConfig
from jaxrl.data.examples import load_examples
from jaxrl.data.reasoning_gym import HASH_DEPENDENT, UNSUPPORTED
from jaxrl.errors import DataError

pytest.importorskip("reasoning_gym", reason="needs the extra `tasks`")


def config(task="spell_backward", **changes):
    return DataConfig(
        source="reasoning_gym", task=task, **({"train_size": 30, "eval_size": 20} | changes)
    )


def with_template(template):
    """What `load_examples` reads of a config, with any template."""
    fields = dataclasses.asdict(config())
    return types.SimpleNamespace(**{**fields, "prompt_template": template})


def test_load_examples_spell_backward_answers_are_right():
    examples = load_examples(config(task_options={"min_word_len": 3, "max_word_len": 5}), "train")

    assert len(examples) == 30
    for example in examples:
        word = example.question.rsplit(": ", 1)[1]
        assert example.answer == word[::-1]
        assert 3 <= len(word) <= 5
        assert example.metadata["word"] == word


def test_load_examples_is_the_same_every_time_and_changes_with_the_seed():
    first = load_examples(config(), "train")

    assert load_examples(config(), "train") == first
    assert load_examples(config(train_seed=5_000), "train") != first


def test_load_examples_template_uses_metadata():
    examples = load_examples(with_template("{word}>"), "train")

    assert all(e.prompt == f"{e.metadata['word']}>" for e in examples)


def test_load_examples_unknown_template_field_lists_the_fields():
    with pytest.raises(DataError, match=r"no field 'wrod'; .*question, source_dataset.*, word"):
        load_examples(with_template("{question}{wrod}"), "eval")


@pytest.mark.parametrize("eval_seed", [0, 1, 17])
def test_load_examples_eval_shares_no_prompt_with_train_even_with_neighbouring_seeds(eval_seed):
    # Two-digit sums: chance repetitions are likely, neighbouring seeds would repeat nearly all.
    settings = config(
        "chain_sum",
        train_size=500,
        eval_size=100,
        eval_seed=eval_seed,
        train_seed=eval_seed + 1,
        task_options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    )

    train = [e.prompt for e in load_examples(settings, "train")]
    held_out = [e.prompt for e in load_examples(settings, "eval")]

    assert len(held_out) == len(set(held_out)) == 100
    assert set(held_out).isdisjoint(train)


def test_load_examples_task_that_is_too_small_raises_with_the_counts():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    settings = config("chain_sum", train_size=2000, eval_size=50, task_options=options)

    with pytest.raises(DataError, match=r"only 0 different .* 2000 training .*eval_size=50"):
        load_examples(settings, "eval")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "spell_backwards"}, "did you mean 'spell_backward'"),
        ({"task": "xyzzy"}, r"is not a reasoning-gym task; there are \d+, such as"),
        ({"task_options": {"min_word_length": 3}}, "no option 'min_word_length'; did you mean"),
        ({"task_options": {"zzz": 3}}, "no option 'zzz'; it has data_file, max_word_len"),
        ({"task_options": {"seed": 3}}, "may not hold 'seed': data.train_seed"),
        (
            {"task_options": {"min_word_len": 9, "max_word_len": 3}},
            "refuses task_options=.*must be",
        ),
        ({"task_options": {"min_word_len": "a"}}, "refuses task_options="),
        ({"task": "graph_color"}, "no single right answer"),
        ({"task": "composite"}, "'composite' is not supported"),
        ({"task": "knight_swap"}, "'knight_swap' is not supported"),
        ({"train_seed": 2**31 - 1}, "must be at most 2147483648"),
    ],
)
def test_load_examples_wrong_config_raises(changes, message):
    with pytest.raises(DataError, match=message):
        load_examples(config(**changes), "train")


def test_load_examples_unknown_split_raises():
    with pytest.raises(DataError, match="split='test' must be"):
        load_examples(config(), "test")


def test_load_examples_without_the_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)

    with pytest.raises(DataError, match=r"pip install 'jaxrl\[tasks\]'"):
        load_examples(config(), "train")


@pytest.mark.parametrize("task", sorted(HASH_DEPENDENT))
def test_load_examples_hash_dependent_task_needs_a_fixed_hash_seed(task, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    with pytest.raises(DataError, match="set PYTHONHASHSEED=0"):
        load_examples(config(task, train_size=1), "train")


DIGEST = """
import hashlib, sys
from reasoning_gym.factory import DATASETS
from jaxrl.config import DataConfig
from jaxrl.data.examples import load_examples

for task in sys.argv[1:] or sorted(DATASETS):
    config = DataConfig(source="reasoning_gym", task=task, train_size=4, eval_size=1)
    try:
        examples = load_examples(config, "train")
    except Exception as error:
        print(task, type(error).__name__)
    else:
        print(task, hashlib.sha256(repr(examples).encode()).hexdigest())
"""


def digests(*tasks):
    """What two processes with different hash seeds make of the tasks."""
    # The guard against random hash seeds reads the variable: "" counts as random.
    code = f"import os; os.environ['PYTHONHASHSEED'] = ''\n{DIGEST}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *tasks],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [dict(line.split() for line in output.splitlines()) for output in outputs]


def test_load_examples_are_the_same_under_every_hash_seed():
    tasks = ["spell_backward", "chain_sum", "letter_counting", "products", "number_filtering"]

    first, second = digests(*tasks)

    assert first == second
    assert "DataError" not in first.values()


@pytest.mark.slow
def test_load_examples_every_task_is_the_same_under_every_hash_seed_or_refused():
    first, second = digests()

    assert first == second
    refused = {task for task, result in first.items() if result == "DataError"}
    assert refused >= HASH_DEPENDENT | UNSUPPORTED.keys()
    assert len(refused) < 15

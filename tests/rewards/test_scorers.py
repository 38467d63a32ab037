"""The scorers of jaxrl, and how scorers are found."""

from __future__ import annotations

import functools
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.errors import ConfigError
from jaxrl.rewards.scorers import (
    SCORERS,
    check_scorer,
    exact,
    last_number,
    load_scorer,
    numeric,
    parse_number,
)
from jaxrl.types import Completion

quick = settings(max_examples=50, deadline=None)


def said(text):
    return Completion(
        np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop", text
    )


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("olleh", "olleh", 1.0),
        (" olleh\n", "olleh", 1.0),
        ("17", "7", 0.0),  # reasoning-gym's own scorer gives 0.5 here
        ("Olleh", "olleh", 0.0),
        ("", "olleh", 0.0),
        ("7.0", "7", 0.0),
        ("7", 7, 1.0),
    ],
)
def test_exact_is_equality_of_stripped_text(text, answer, score):
    assert exact(said(text), {"answer": answer}) == score


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("1,000", "1000", 1.0),
        ("1000.00", "1,000", 1.0),
        ("1e3", "1000", 1.0),
        ("1/2", "0.5", 1.0),
        ("2 / 4", "1/2", 1.0),
        ("-0", "0", 1.0),
        ("+3.", "3", 1.0),
        (".5", "1/2", 1.0),
        ("\u22124", "-4", 1.0),
        ("$1,234.50", "1234.5", 1.0),
        ("0.1", "0.10000000000000001", 0.0),
        ("17", "7", 0.0),
        ("7 apples", "7", 0.0),
        ("1,00", "100", 0.0),
        ("1/0", "1", 0.0),
        ("nan", "1", 0.0),
        ("inf", "1", 0.0),
        ("1e999999999", "1", 0.0),
        ("9**9**9**9", "1", 0.0),
        ("__import__('os')", "1", 0.0),
        ("٣", "3", 0.0),
        ("", "0", 0.0),
        ("9" * 100_000, "1", 0.0),
    ],
)
def test_numeric_compares_whole_text_as_exact_number(text, answer, score):
    assert numeric(said(text), {"answer": answer}) == score


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("3 + 4 = 7", "7", 1.0),
        ("So she has 1,200 apples.", "1200", 1.0),
        ("first 7, then 8", "7", 0.0),
        ("5-2", "2", 1.0),
        ("it is -2", "-2", 1.0),
        ("1/2", "0.5", 1.0),
        ("x3", "3", 0.0),
        ("none", "0", 0.0),
        ("it is " + "9" * 100_000, "1", 0.0),
        # As models answer questions like those of GSM8K.
        ("16 - 7 = 9 eggs.\n#### 18", "18", 1.0),
        ("She makes $18.00", "18", 1.0),
        ("She makes 18 dollars.", "18", 1.0),
        ("**18**", "18", 1.0),
        ("The answer is \\boxed{18}.", "18", 1.0),
        ("\\boxed{\\$1,800}", "1800", 1.0),
        ("$9 * 2 = \\$18$.", "18", 1.0),
        ("a loss of $-18", "-18", 1.0),
    ],
)
def test_last_number_reads_the_last_number_only(text, answer, score):
    assert last_number(said(text), {"answer": answer}) == score


@pytest.mark.parametrize("scorer", [numeric, last_number])
@pytest.mark.parametrize("text", ["7", "no idea"])
def test_numeric_reference_that_is_no_number_raises(scorer, text):
    with pytest.raises(ValueError, match="the reference answer 'seven' is not a number"):
        scorer(said(text), {"answer": "seven"})


@quick
@given(st.fractions())
def test_parse_number_reads_every_fraction_exactly(value):
    assert parse_number(str(value)) == value


@quick
@given(st.integers(-(10**12), 10**12))
def test_parse_number_reads_thousands_separators(value):
    assert parse_number(f"{value:,}") == Fraction(value)


@quick
@given(st.text(max_size=30))
def test_parse_number_any_text_never_raises(text):
    result = parse_number(text)

    assert result is None or isinstance(result, Fraction)


@pytest.mark.parametrize("name", SCORERS)
def test_scorers_can_be_pickled(name):
    assert pickle.loads(pickle.dumps(SCORERS[name])) is load_scorer(name)


def test_load_scorer_module_and_function():
    assert load_scorer("jaxrl.rewards.scorers:exact") is exact


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exat", "must be one of exact, numeric, last_number, symbolic, or .*did you mean 'exact'"),
        ("jaxrl.rewards.scorers", "must be one of"),
        ("jaxrl.rewards.scorers:", "must be one of"),
        ("no_such_module:f", "module 'no_such_module' cannot be imported: ModuleNotFoundError"),
        (".relative:f", "cannot be imported"),
        ("jaxrl.rewards.scorers:exat", "has no 'exat'; did you mean 'exact'"),
        ("jaxrl.rewards.scorers:SCORERS", "must be a function, got dict"),
        ("fractions:Fraction", "must be a function, got"),
        ("jaxrl.rewards.scorers:parse_number", r"must be callable as scorer\(completion, refer"),
    ],
)
def test_load_scorer_wrong_name_raises(name, message):
    with pytest.raises(ConfigError, match=message):
        load_scorer(name)


def test_check_scorer_async_function_raises():
    async def scorer(completion, reference): ...

    with pytest.raises(ConfigError, match="the scorer is async"):
        check_scorer(scorer, "the scorer")


def test_check_scorer_partial_and_callable_object_pass():
    class Scorer:
        def __call__(self, completion, reference):
            return 0.0

    check_scorer(functools.partial(lambda scale, c, r: scale, 2.0), "the scorer")
    check_scorer(Scorer(), "the scorer")

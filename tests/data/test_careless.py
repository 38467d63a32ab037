"""Imperfect demonstrations for the cold start."""

from __future__ import annotations

from jaxrl.data.examples import Example
from jaxrl.data.supervised import careless


def examples(answers):
    return [Example(f"q{i}", answer, {}, "{question}") for i, answer in enumerate(answers)]


def answers(given, **options):
    return [example.answer for example in careless(examples(given), seed=0, **options)]


def test_careless_fraction_one_cuts_longer_answers_only():
    assert answers(["abc", "abcd", "abcde"], fraction=1.0, above=3) == ["abc", "abc", "abcd"]


def test_careless_fraction_zero_changes_nothing():
    assert answers(["abc", "abcd"], fraction=0.0, above=0) == ["abc", "abcd"]


def test_careless_never_leaves_an_empty_answer():
    assert answers(["a", "ab"], fraction=1.0, above=0) == ["a", "a"]


def test_careless_share_of_cut_answers_is_the_fraction():
    cut = answers(["abcde"] * 2000, fraction=0.85, above=4)

    assert abs(sum(answer == "abcd" for answer in cut) / 2000 - 0.85) < 0.03


def test_careless_cuts_the_solution_where_that_is_what_is_taught():
    whole = Example("q", "42", target="so it is #### 42")

    (cut,) = careless([whole], fraction=1.0, above=0, seed=0)

    assert (cut.answer, cut.demonstration) == ("42", "so it is #### 4")

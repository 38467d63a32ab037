"""Templates and what may stand in them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from jaxrl.data.examples import Example, check_template, plain
from jaxrl.errors import DataError


def example(template="{question}", **metadata):
    return Example("What?", "yes", metadata, template)


def test_prompt_fills_question_and_metadata_into_the_template():
    assert example("Q: {question} ({word:>4}, {{x}})", word="ab").prompt == "Q: What? (  ab, {x})"


def test_prompt_braces_in_a_question_are_text():
    assert Example("{answer} {0}", "a").prompt == "{answer} {0}"


def test_pieces_tell_the_template_from_what_fills_it():
    assert example("<eos>{question}!").pieces() == [
        ("<eos>", True),
        ("What?", False),
        ("!", True),
    ]


def test_prompt_format_that_does_not_fit_the_value_raises():
    with pytest.raises(DataError, match=r"'\{word:d\}' does not fit an example"):
        _ = example("{word:d}", word="a").prompt


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{wrod}", "no field 'wrod'; the examples have question, word"),
        ("{answer}", "no field 'answer'"),
        ("no field", "must name a field"),
        ("{", "is not a format string"),
        ("{}", "must be the plain name of a field"),
        ("{question.__class__}", "must be the plain name of a field"),
        ("{word[0]}", "must be the plain name of a field"),
    ],
)
def test_check_template_wrong_template_raises(template, message):
    examples = [Example("a", "b", {"word": "x", "answer": "b"}), Example("c", "d", {"word": "y"})]

    with pytest.raises(DataError, match=message):
        check_template(template, examples)


def test_check_template_field_that_some_examples_lack_raises():
    with pytest.raises(DataError, match="no field 'word'"):
        check_template("{word}", [example(word="a"), example()])


def test_check_template_field_that_is_the_answer_everywhere_raises():
    leaking = [Example("a", "1", {"solution": 1}), Example("b", "2", {"solution": 2})]
    accident = [Example("a", "1", {"n": 1}), Example("b", "2", {"n": 3})]

    check_template("{n}", accident)
    with pytest.raises(DataError, match=r"\{solution\} is the answer in every example"):
        check_template("{question} {solution}", leaking)


def test_plain_reduces_values_to_json():
    value = {"a": (1, 2.5), 3: {"b"}, "f": Fraction(1, 2), "n": None}

    assert plain(value) == {"a": [1, 2.5], "3": ["b"], "f": "1/2", "n": None}

"""Files of questions and answers."""

from __future__ import annotations

import gzip
import json

import pytest

from jaxrl.config import DataConfig
from jaxrl.data.examples import load_examples
from jaxrl.data.jsonl import read_jsonl
from jaxrl.errors import DataError


def write(path, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def config(path, **changes):
    return DataConfig(
        source="jsonl", path=str(path), **({"train_size": 6, "eval_size": 3} | changes)
    )


def records(count):
    return [{"question": f"{i} + {i}?", "answer": str(2 * i), "level": i % 3} for i in range(count)]


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz"])
def test_read_jsonl_gives_question_answer_and_metadata(name, tmp_path):
    examples = read_jsonl(write(tmp_path / name, records(3)))

    assert [(e.question, e.answer, e.metadata) for e in examples] == [
        ("0 + 0?", "0", {"level": 0}),
        ("1 + 1?", "2", {"level": 1}),
        ("2 + 2?", "4", {"level": 2}),
    ]


def test_read_jsonl_gsm8k_answer_is_what_follows_the_mark(tmp_path):
    text = "3 * 4 = <<3*4=12>>12\nso #### no\n#### 1,200 "

    (example,) = read_jsonl(write(tmp_path / "a.jsonl", [{"question": "q", "answer": text}]))

    assert example.answer == "1,200"
    assert example.metadata == {"solution": text}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 18", "18"),
        ("no #### 3, but #### -1,234,567.5 ", "-1234567.5"),
        ("####18", "18"),
        ("#### 1,2 and 3,400", "1,2 and 3400"),
    ],
)
def test_read_jsonl_gsm8k_format_gives_answer_and_whole_target(text, answer, tmp_path):
    path = write(tmp_path / "a.jsonl.gz", [{"question": "q", "answer": text}])

    (example,) = read_jsonl(path, answer_format="gsm8k")

    assert (example.answer, example.demonstration) == (answer, text)
    assert example.metadata == {"solution": text}


def test_read_jsonl_gsm8k_format_line_without_mark_is_named(tmp_path):
    rows = [{"question": "q", "answer": a} for a in ("#### 1", "so it is 2")]

    with pytest.raises(DataError, match="a.jsonl:2: 'answer' must hold #### .* got 'so it is 2'"):
        read_jsonl(write(tmp_path / "a.jsonl", rows), answer_format="gsm8k")


def test_read_jsonl_plain_format_takes_the_mark_as_text(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a #### b"}])

    (example,) = read_jsonl(path, answer_format="plain")

    assert (example.answer, example.demonstration, example.metadata) == ("a #### b", "a #### b", {})


def test_load_examples_reads_answers_in_the_format_of_the_config(tmp_path):
    rows = [{"question": f"q{i}", "answer": f"so #### 1,00{i}"} for i in range(9)]
    path = write(tmp_path / "a.jsonl", rows)

    examples = load_examples(config(path, answer_format="gsm8k"), "eval")

    assert {e.answer[:3] for e in examples} == {"100"}
    assert all(e.target.startswith("so #### 1,00") for e in examples)


def test_read_jsonl_number_answer_blank_lines_and_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": 7}\r\n\r\n\n')

    assert read_jsonl(path)[0].answer == "7"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "q", ', "a.jsonl:2: not a JSON record"),
        (b"[1]", "a.jsonl:2: a record must be a JSON object, got list"),
        (b'{"question": "q"}', r"a.jsonl:2: no 'answer'; the record has \['question'\]"),
        (b'{"question": " ", "answer": "a"}', "a.jsonl:2: 'question' must be a text"),
        (b'{"question": 3, "answer": "a"}', "a.jsonl:2: 'question' must be a text"),
        (b'{"question": "q", "answer": null}', "a.jsonl:2: 'answer' must be a text or a number"),
        (b'{"question": "q", "answer": true}', "got True"),
        (b'{"question": "q", "answer": "so #### "}', "a.jsonl:2: 'answer' is empty"),
        (b'{"question": "\xff", "answer": "a"}', "a.jsonl:2: not a JSON record"),
        (b'{"question": "q", "answer": NaN}', "a.jsonl:2: not a JSON record: NaN is not JSON"),
        (rb'{"question": "\ud800", "answer": "a"}', "a.jsonl:2: not a JSON record: .* surrogates"),
        (b"[" * 100_000, "a.jsonl:2: not a JSON record"),
    ],
)
def test_read_jsonl_bad_line_is_named(line, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "a"}\n' + line + b"\n")

    with pytest.raises(DataError, match=message):
        read_jsonl(path)


def test_read_jsonl_missing_empty_or_broken_file_raises(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    whole = write(tmp_path / "a.jsonl.gz", records(500)).read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jsonl.gz").write_text("{}")

    for name, message in [
        ("none.jsonl", "cannot be read: No such file"),
        ("empty.jsonl", "has no examples"),
        ("cut.jsonl.gz", r"cannot be read after line \d+: Compressed file ended"),
        ("text.jsonl.gz", "cannot be read: Not a gzipped file"),
    ]:
        with pytest.raises(DataError, match=message):
            read_jsonl(tmp_path / name)


def test_load_examples_splits_one_file_without_a_shared_prompt(tmp_path):
    # Every question twice: both copies must be on the same side.
    path = write(tmp_path / "a.jsonl", records(10) + records(10))

    train = load_examples(config(path), "train")
    held_out = load_examples(config(path), "eval")

    assert len(train) == 6
    assert len({e.prompt for e in held_out}) == len(held_out) == 3
    assert {e.prompt for e in train}.isdisjoint(e.prompt for e in held_out)


def test_load_examples_held_out_prompts_do_not_depend_on_train_size_or_line_order(tmp_path):
    path = write(tmp_path / "a.jsonl", records(20))
    turned = write(tmp_path / "b.jsonl", records(20)[::-1])

    held_out = load_examples(config(path), "eval")

    assert load_examples(config(path, train_size=15), "eval") == held_out
    assert load_examples(config(turned), "eval") == held_out
    assert load_examples(config(path, eval_seed=99), "eval") != held_out


def test_load_examples_file_that_is_too_small_raises_with_the_counts(tmp_path):
    path = write(tmp_path / "a.jsonl", records(8))

    with pytest.raises(DataError, match=r"has 8 examples: with 3 .* 5 are left for .*train_size=6"):
        load_examples(config(path), "train")


def test_read_jsonl_template_with_a_field_of_the_file(tmp_path):
    path = write(tmp_path / "a.jsonl", records(9))

    examples = read_jsonl(path, template="[{level}] {question}")

    assert all(e.prompt == f"[{e.metadata['level']}] {e.question}" for e in examples)


def test_read_jsonl_number_that_no_float_holds_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": 1e999}')

    with pytest.raises(DataError, match=r"a\.jsonl:1: 'answer' must be a finite number, got inf"):
        read_jsonl(path)

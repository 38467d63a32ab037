"""Text that is sampled by hand is encoded exactly as the prompts of training are."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import tokenizers

from jaxrl.data.prompts import encode_prompt
from jaxrl.errors import DataError, RequestError
from jaxrl.orchestration.samplers import (
    TextPieces,
    TextSampler,
    as_example,
    eval_params,
    make_driver_for,
    make_engine,
    text_request,
)
from jaxrl.orchestration.session import Parts, Session
from jaxrl.types import Completion, SamplingParams
from jaxrl.weights.digest import stamp

WORDS = ["<unk>", "<go>", "<stop>", "<user>", "say", "hello", "{", "}"]


@pytest.fixture
def tokenizer_folder(tmp_path):
    """Words between spaces, with a bos that belongs before every text and a special <user>."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(WORDS[1:4])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<go> $A", special_tokens=[("<go>", 1)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    roles = {"eos_token": "<stop>", "bos_token": "<go>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    return tmp_path


class _Recorder:
    """Takes requests in place of the driver: what is tested is what would be sent."""

    def sample_blocking(self, tokens, params):
        self.tokens, self.params = tokens.tolist(), params
        empty = np.zeros(0, np.int32)
        return Completion(empty, np.zeros(0, np.float32), empty, "", "stop")


@pytest.fixture
def make_parts(make_config, tokenizer_folder):
    """Function (template) -> parts of a run with these words."""

    def make(template):
        data = {"tokenizer": str(tokenizer_folder), "prompt_template": template}
        return Parts(make_config(data=data))

    return make


@pytest.fixture
def sent(make_parts):
    """Function (text, template, raw) -> the token ids that the driver gets."""

    def send(text, template="{question}", raw=False):
        driver = _Recorder()
        TextSampler(driver, make_parts(template)).generate(text, raw=raw)
        return driver.tokens

    return send


def test_generate_puts_the_bos_and_recognises_special_tokens_of_the_template_only(sent):
    assert sent("say hello") == [1, 4, 5]
    assert sent("<user>x", template="<user> {question}") == [1, 3, 0]


def test_generate_encodes_as_training_does(sent, make_parts):
    template = "<user> say {word}"

    expected = encode_prompt(as_example(template, "hello"), make_parts(template).tokenizer)

    assert sent("hello", template=template) == expected.tolist() == [1, 3, 4, 5]


def test_generate_raw_text_is_the_template_with_special_tokens_and_braces(sent):
    assert sent("<user> { hello }", template="say {question}", raw=True) == [1, 3, 6, 5, 7]


def test_generate_text_for_a_template_of_several_fields_stands_alone(sent):
    assert sent("hello", template="say {a} {b}") == [1, 5]


def test_generate_empty_text_is_refused(sent):
    with pytest.raises(RequestError, match="is empty: it must hold something to complete"):
        sent("  ")


CHAT = (
    "<go>{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }}{% else %}"
    " {{ m.content }}{% endif %}{% endfor %}{% if not add_generation_prompt %}<done>{% endif %}"
)


@pytest.fixture
def chat_parts(make_config, tokenizer_folder):
    """Function (data changes) -> parts of a run that asks in a chat; <done> ends a reply."""
    inner = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    inner.add_special_tokens(["<done>"])
    inner.save(str(tokenizer_folder / "tokenizer.json"))
    (tokenizer_folder / "chat_template.jinja").write_text(CHAT)
    (tokenizer_folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')

    def make(**changes):
        data = {"tokenizer": str(tokenizer_folder), "chat": True, "system_prompt": "hello"}
        return Parts(make_config(data=data | changes))

    return make


def test_generate_asks_in_a_chat_and_stops_where_it_ends(chat_parts):
    driver, parts = _Recorder(), chat_parts()

    TextSampler(driver, parts).generate("say this")

    assert driver.tokens == [1, 5, 3, 4, 0]
    assert driver.params.stop_tokens == (8, 2, 0)
    assert eval_params(parts).stop_tokens == (8, 2, 0)


@pytest.mark.parametrize("chat", [True, False])
def test_generate_special_token_that_the_vocabulary_makes_of_a_text_is_refused(chat_parts, chat):
    # Its words are looked up in the vocabulary, where <user> is one of them.
    parts = chat_parts() if chat else chat_parts(chat=False, system_prompt="")

    with pytest.raises(DataError, match="makes the special token '<user>' of plain text"):
        TextSampler(_Recorder(), parts).generate("say <user>")


def test_generate_raw_text_is_no_chat(chat_parts):
    driver = _Recorder()

    TextSampler(driver, chat_parts()).generate("<user> say", raw=True)

    assert driver.tokens == [1, 3, 4]


def test_engine_takes_as_many_stop_tokens_as_the_chat_has(chat_parts):
    parts = chat_parts()
    parts.stop_ids = tuple(range(9))

    assert make_engine(parts).max_stop_tokens == 9


def test_check_tokenizer_without_chat_template_is_refused_before_anything_is_written(
    make_config, tmp_path
):
    config = make_config(data={"chat": True})

    with pytest.raises(DataError, match="no chat template: looked for the tokenizer 'chars'"):
        Session(config).open()

    assert not (tmp_path / "run").exists()


def test_check_system_prompt_that_the_template_refuses_is_found_before_anything_is_written(
    chat_parts, tokenizer_folder, tmp_path
):
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (tokenizer_folder / "chat_template.jinja").write_text(refuses + CHAT)

    with pytest.raises(DataError, match="line 1: the chat template failed: no system"):
        Session(chat_parts().config).open()

    assert not (tmp_path / "run").exists()


@pytest.fixture
def served(make_config):
    """Function (prompts, new tokens) -> a started driver of a random model, and its parts."""
    drivers = []

    def serve(prompts, new_tokens, **changes):
        parts = Parts(make_config(**changes))
        params = parts.initial_params()
        driver = make_driver_for(parts, params, stamp(params, 0), prompts, new_tokens=new_tokens)
        drivers.append(driver)
        return driver, parts

    yield serve
    for driver in drivers:
        driver.stop()


def test_driver_for_prompts_compiles_and_holds_no_more_than_they_need(served):
    driver, parts = served([np.ones(3, np.int32)] * 3, 5)

    stats, engine = driver.stats(), driver.engine
    driver.sample_blocking(np.ones(3, np.int32), SamplingParams(5))

    assert engine.max_length == 8 + 5
    assert engine.slots == -(-3 // parts.row_shards) * parts.row_shards
    assert stats.compile_count == driver.stats().compile_count == 6


def test_driver_for_prompts_that_are_too_long_is_refused_before_anything_is_compiled(served):
    with pytest.raises(
        RequestError, match=r"prompt of 9 tokens \+ 8 new ones = 17 is beyond the 16"
    ):
        served([np.ones(2, np.int32), np.ones(9, np.int32)], 8)


def test_pieces_together_are_the_text_of_the_completion(served):
    driver, parts = served([np.ones(4, np.int32)] * 4, 8, data={"tokenizer": "bytes"})

    for seed in range(12):
        tokens, params = text_request(parts, "ab=", max_new_tokens=8, temperature=1.0, seed=seed)
        # Any of these ends it: half of the completions are cut by a stop token.
        params = dataclasses.replace(params, stop_tokens=tuple(range(100, 108)))
        pieces = TextPieces(driver, tokens, params)
        text = "".join(pieces)

        whole = driver.sample_blocking(tokens, params)
        assert text == pieces.completion.text == whole.text
        assert 0 < pieces.first_chunk <= len(whole.tokens)

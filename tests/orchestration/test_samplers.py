"""Text that is sampled by hand is encoded exactly as the prompts of training are."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers

from jaxrl.data.prompts import encode_prompt
from jaxrl.errors import RequestError
from jaxrl.orchestration.samplers import TextSampler, as_example
from jaxrl.orchestration.session import Parts
from jaxrl.types import Completion

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
        self.tokens = tokens.tolist()
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

"""A real model, SmolLM2-135M-Instruct as GGUF: `JAXRL_SMOLLM2_GGUF` says where it is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.config import published_model
from jaxrl.data.gguf_tokenizer import gguf_chat_template
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.models.model import build_model, forward, unembed
from jaxrl.models.safetensors import load_params

VARIABLE = "JAXRL_SMOLLM2_GGUF"
pytestmark = pytest.mark.slow

TEXT = (
    "The lighthouse stood at the end of a narrow spit of rock, and on clear nights its beam could "
    "be seen from thirty miles away. For 112 years somebody had climbed the stairs every evening "
    "to light the lamp; now a small machine did it, and the keeper's house was empty. Children "
    "from the village said that the old man still walked there when the fog came in, but nobody "
    "had ever met him, and the fog never stayed for long."
)
OTHERS = ["日本語の文", "naïve café…", "x = [1, 22, 333]\n\n\tif x:\r\n", "<|im_end|>", "", "  two"]


@pytest.fixture(scope="module")
def path():
    found = os.environ.get(VARIABLE, "")
    if not Path(found).is_file():
        pytest.skip(f"{VARIABLE} does not name the file of SmolLM2-135M-Instruct")
    pytest.importorskip("gguf", reason="the file is quantised")
    return Path(found)


@pytest.fixture(scope="module")
def ours(path):
    """(function ids -> logits [T, V], tokenizer)"""
    model = build_model(published_model(path, max_length=256))
    params = load_params(path, model)

    @jax.jit
    def run(params, ids):
        hidden, _ = forward(model, params, ids, np.arange(ids.shape[1], dtype=np.int32)[None])
        return unembed(model, params, hidden)[0]

    def logits(ids):
        with jax.default_matmul_precision("highest"):
            return np.asarray(run(params, np.array([ids], np.int32)))

    return logits, load_tokenizer(str(path))


@pytest.fixture(scope="module")
def theirs(path):
    """The model and tokenizer that transformers makes of the file, in float32."""
    torch = pytest.importorskip("torch", reason="the comparison needs torch and transformers")
    transformers = pytest.importorskip("transformers", reason="the comparison needs transformers")
    pytest.importorskip("accelerate", reason="transformers loads GGUF files with accelerate only")
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(**where)


def test_real_text_comes_back_from_its_tokens(ours):
    _, tokenizer = ours

    for text in [TEXT, *OTHERS]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_real_tokens_equal_those_of_transformers(ours, theirs):
    _, tokenizer = ours

    for text in [TEXT, *OTHERS]:
        want = theirs[1](text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert tokenizer.encode(text) == want, text


def test_real_logits_and_log_probabilities_equal_those_of_transformers(ours, theirs):
    import torch

    logits_of, tokenizer = ours
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 64

    logits = logits_of(ids)

    with torch.no_grad():
        want = theirs[0](torch.tensor([ids])).logits[0]
    np.testing.assert_allclose(logits, want.numpy(), rtol=0, atol=2e-4)
    np.testing.assert_array_equal(logits.argmax(-1), want.numpy().argmax(-1))
    logp = np.asarray(jax.nn.log_softmax(logits, -1))
    np.testing.assert_allclose(logp, torch.log_softmax(want, -1).numpy(), rtol=0, atol=2e-4)
    # A model of English, not noise: it gives the next token of the text a fair probability.
    assert logp[np.arange(len(ids) - 1), ids[1:]].mean() > -5


def test_real_template_asks_and_the_model_knows_the_capital_of_france(path, ours):
    jinja2 = pytest.importorskip("jinja2", reason="the template is written in Jinja")
    logits_of, tokenizer = ours
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    template = jinja2.Environment().from_string(gguf_chat_template(path))
    text = template.render(messages=messages, add_generation_prompt=True)
    ids = _with_specials(tokenizer, text)

    # Padded to one length, so that one program serves; what follows a token does not change it.
    start = len(ids)
    while len(ids) < start + 24 and tokenizer.eos_id not in ids[start:]:
        padded = ids + [tokenizer.pad_id] * (96 - len(ids))
        ids.append(int(logits_of(padded)[len(ids) - 1].argmax()))

    assert tokenizer.eos_id in ids[start:]
    assert "Paris" in tokenizer.decode(ids[start:])


def _with_specials(tokenizer, text):
    """Tokens of a template's text, in which special tokens are meant."""
    specials = tokenizer.special_tokens
    pieces = re.split(f"({'|'.join(map(re.escape, specials))})", text)
    return [
        id_
        for piece in pieces
        for id_ in ([specials[piece]] if piece in specials else tokenizer.encode(piece))
    ]

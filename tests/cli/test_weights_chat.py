"""Published chat models are asked through their template; published weights are converted."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxrl.config import ModelConfig, published_model
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.models.model import build_model, init_params
from jaxrl.models.safetensors import load_params, save_params

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny random model and the tokenizer "bytes", without a template."""
    folder = tmp_path_factory.mktemp("plain") / "tiny"
    config = ModelConfig(
        n_layers=1, d_model=16, n_heads=2, n_kv_heads=1, head_dim=8, mlp_dim=16, vocab_size=259,
        max_length=64,
    )  # fmt: skip
    built = build_model(config)
    save_params(folder, built, init_params(built, 3))
    load_tokenizer("bytes").save(folder)
    return folder


@pytest.fixture(scope="module")
def chat_model(model, tmp_path_factory):
    """The same with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_generate_asks_through_the_chat_template_unless_it_is_told_not_to(jaxrl, chat_model):
    flags = ("generate", "Hi", "--weights", chat_model, "--max-new-tokens=2")

    chat, system, raw = jaxrl(*flags), jaxrl(*flags, "--system=be"), jaxrl(*flags, "--raw")

    # "u:Hi;a:", "s:be;u:Hi;a:", "Hi"
    for (code, _, log), length in ((chat, 7), (system, 12), (raw, 2)):
        assert code == 0, log
        assert f"prompt {length} tokens" in log


def test_eval_asks_through_the_chat_template(jaxrl, chat_model, tmp_path):
    path, predictions = tmp_path / "q.jsonl", tmp_path / "p.jsonl"
    path.write_text('{"question": "Hi", "answer": "2"}\n')
    flags = ("--weights", chat_model, "--max-new-tokens=8")

    code, _, log = jaxrl("eval", *flags, "--data", path, "--predictions", predictions)

    assert code == 0, log
    answer = json.loads(predictions.read_text())["completion"]
    assert answer + "\n" == jaxrl("generate", "Hi", *flags)[1]
    assert answer + "\n" != jaxrl("generate", "Hi", *flags, "--raw")[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--system=be",), "--system='be' needs a chat template; "),
        (("--system=be", "--raw"), "--system='be' needs a chat template; --raw asks without one"),
    ],
)
def test_generate_system_without_a_template_is_refused(jaxrl, model, flags, message):
    code, _, log = jaxrl("generate", "Hi", "--weights", model, *flags)

    assert code == 2
    assert message in log


def test_convert_published_weights_to_another_dtype_keeps_everything_else(
    jaxrl, chat_model, tmp_path
):
    to = tmp_path / "out"

    code, out, log = jaxrl(
        "convert", "--weights", chat_model, "--to", to, "--config.model.param_dtype=bfloat16"
    )

    assert (code, out) == (0, f"{to}\n"), log
    before, after = published_model(chat_model), published_model(to)
    assert after == dataclasses.replace(before, weights=str(to))
    old, new = (load_params(folder, build_model(before)) for folder in (chat_model, to))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.astype("bfloat16").astype("float32"), b),
        old, new,
    )  # fmt: skip
    assert (to / "chat_template.jinja").read_text() == TEMPLATE
    code, _, log = jaxrl("convert", "--weights", chat_model, "--to", to)
    assert code == 1
    assert "already holds config.json" in log

"""Runs that start from published weights."""

from __future__ import annotations

import dataclasses

import gguf_files
import jax
import numpy as np
import pytest
import tokenizers

from jaxrl.config import published_model
from jaxrl.errors import CheckpointError
from jaxrl.models.model import build_model, init_params
from jaxrl.models.safetensors import save_params
from jaxrl.orchestration.sft import SFTTrainer


@pytest.fixture
def published(make_config, tmp_path):
    """A folder with the run's model, and its weights."""
    model = build_model(dataclasses.replace(make_config().model, vocab_size=128))
    params = init_params(model, 5)
    save_params(tmp_path / "published", model, params)
    return tmp_path / "published", params


def test_run_starts_from_published_weights(make_config, published):
    folder, params = published
    config = make_config(model=published_model(folder))

    trainer = SFTTrainer(config, devices=jax.devices()[:2])

    jax.tree.map(np.testing.assert_array_equal, trainer.engine.params, params)


def test_run_with_weights_of_another_shape_is_refused_before_anything_is_written(
    make_config, published, tmp_path
):
    config = make_config(model=published_model(published[0], mlp_dim=32))

    with pytest.raises(CheckpointError, match=r"gate_proj.weight' is \[64, 32\], .* \[32, 32\]"):
        SFTTrainer(config, devices=jax.devices()[:1])
    assert not (tmp_path / "run").exists()


def _byte_tokenizer(writer):
    """Metadata of a tokenizer with a token for each byte, and one merge."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", *alphabet, "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)


def test_run_starts_from_a_gguf_file_and_its_tokenizer(make_config, tmp_path):
    pytest.importorskip("gguf", reason="files are written by the package gguf")
    model = build_model(dataclasses.replace(make_config().model, vocab_size=288))
    params = init_params(model, 5)
    tensors = gguf_files.published_tensors(model, params)
    path = gguf_files.write_model(tmp_path / "m.gguf", model, tensors, describe=_byte_tokenizer)
    config = make_config(model=published_model(path), data={"tokenizer": str(path)})

    trainer = SFTTrainer(config, devices=jax.devices()[:2])

    assert trainer.config.model.vocab_size == 288
    jax.tree.map(np.testing.assert_array_equal, trainer.engine.params, params)

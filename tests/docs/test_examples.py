"""The Python examples of the README and of the pages run, with the objects that they speak of."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from pathlib import Path

import gguf_files
import jax
import numpy as np
import pytest
from data.chat_cases import TEMPLATES, byte_tokenizer

from jaxrl.config import (
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    ObserveConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
    published_model,
)
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.models.model import build_model, init_params
from jaxrl.models.safetensors import save_params
from jaxrl.sharding import make_mesh
from jaxrl.types import Completion

_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MODEL = {"n_layers": 1, "d_model": 16, "n_heads": 4, "n_kv_heads": 4, "head_dim": 4, "mlp_dim": 32}


@pytest.fixture
def examples(repo_root, tmp_path, monkeypatch):
    """Function (page) -> its Python examples; files they write go to a temporary folder."""
    monkeypatch.chdir(tmp_path)
    return lambda page: _EXAMPLE.findall((repo_root / page).read_text(encoding="utf-8"))


def run(block: str, **objects) -> dict:
    """Run an example, which may await, with `objects` as its globals; returns them all."""
    space = {"__name__": "example", **objects}
    code = compile(block, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, space))
    else:
        exec(code, space)
    return space


def answer(text: str) -> Completion:
    """A completion of one token with this text."""
    tokens = np.zeros(1, np.int32)
    return Completion(tokens, np.zeros(1, np.float32), tokens, "stop", text=text)


def tiny_run(tmp_path) -> ExperimentConfig:
    """One update of the cold start and one of RL."""
    rows = [{"question": f"{i}=", "answer": str(i)} for i in range(10, 40)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"source": "jsonl", "path": "questions.jsonl", "max_prompt_tokens": 8}
    return ExperimentConfig(
        output_dir="run",
        model=ModelConfig(**_MODEL, max_length=16),
        data=DataConfig(**data, train_size=20, eval_size=4),
        sft=SFTConfig(steps=1, batch_size=4),
        train=TrainConfig(steps=1, batch_size=8),
        rollout=RolloutConfig(group_size=4, max_new_tokens=4, slots=8),
        eval=EvalConfig(size=4),
        observe=ObserveConfig(progress=False, tensorboard=False, compilation_cache="off"),
    )


def test_readme_examples_run(examples, tmp_path):
    config, reward, notebook, sharding = examples("README.md")
    params = {"kernel": np.ones((8, 4), np.float32)}

    assert isinstance(run(config)["get_config"](), ExperimentConfig)
    exact = run(reward)["exact"]
    assert [exact(answer(text), {"answer": "ab"}) for text in (" ab", "b")] == [1.0, 0.0]
    placed = run(sharding, params=params, axes={"kernel": ("embed", "heads")})["params"]
    assert placed["kernel"].sharding.mesh.shape["tensor"] == 4
    # A run on eight devices needs batches and heads that divide: the README's user has them too.
    run(notebook, config=tiny_run(tmp_path))
    assert (tmp_path / "run" / "weights" / "2").is_dir()


def test_rewards_page_examples_run(examples):
    scorer, pool = examples("docs/rewards.md")

    score = run(scorer)["score"]
    used = run(pool, completion=answer("olleh"))

    assert score(answer("olleh"), {"answer": "olleh"}) == 1.0
    assert (used["result"].outcome, used["result"].value) == ("ok", 1.0)


def test_meshes_page_example_runs(examples):
    (check,) = examples("docs/meshes.md")

    run(check)


def test_distributed_page_examples_run(examples):
    alone, group = examples("docs/distributed.md")

    assert run(alone)["processes"].count == 1
    assert run(group)["group"].size == 1


def test_weights_page_example_runs(examples):
    (store,) = examples("docs/weights.md")[:1]
    model = build_model(ModelConfig(**_MODEL, vocab_size=32, max_length=16))
    mesh = make_mesh(data=4, tensor=2)
    params = init_params(model, 0)

    space = run(store, params=params, model=model, mesh=mesh, shardings=model.shardings(mesh))

    assert space["version"].number == 7
    assert jax.tree.leaves(space["params"])[0].sharding.mesh == mesh


def test_models_page_examples_run(examples):
    config, gguf_config, in_and_out = examples("docs/models.md")
    model = build_model(ModelConfig(**_MODEL, vocab_size=32, max_length=1024))
    save_params("models/my-llama", model, init_params(model, 0))

    file = Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")
    file.write_bytes(gguf_files.tiny())

    loaded = run(config)["get_config"]()
    from_gguf = run(gguf_config)["get_config"]()
    run(in_and_out, model=model, mesh=make_mesh(data=4, tensor=2))

    assert loaded.model.weights == "models/my-llama"
    assert from_gguf.model.weights == from_gguf.data.tokenizer == str(file)
    assert published_model("models/trained", weights="") == model.config


def test_data_page_chat_example_runs(examples):
    templates = {"default": TEMPLATES["qwen3"]}
    byte_tokenizer("qwen3", chat_templates=templates).save("models/chat")

    space = run(examples("docs/data.md")[1])

    assert space["text"].endswith("What is 2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert space["ids"].dtype == np.int32


def test_data_page_example_runs(examples):
    pytest.importorskip("reasoning_gym", reason="the example needs the extra `tasks`")
    (stream,) = examples("docs/data.md")[:1]

    space = run(stream)

    assert len(space["held_out"]) == 200
    assert space["stream"][123_456].id.startswith("train/e123/")


@pytest.mark.slow
def test_inference_page_example_runs(examples):
    (driver,) = examples("docs/inference.md")[:1]
    tokenizer = load_tokenizer("chars")
    config = ModelConfig(**_MODEL, vocab_size=tokenizer.vocab_size, max_length=512)
    model = build_model(config)
    tokens = np.arange(3, 9, dtype=np.int32)

    space = run(
        driver,
        model=model,
        train_params=init_params(model, 0),
        tokenizer=tokenizer,
        tokens=tokens,
    )

    assert len(space["completion"].tokens) == 64
    assert isinstance(space["text"], str)

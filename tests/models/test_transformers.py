"""Published families give the numbers of Hugging Face transformers, both ways."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.config import published_model
from jaxrl.models.model import build_model, forward, sequence_logprobs, unembed
from jaxrl.models.safetensors import load_params, save_params

torch = pytest.importorskip("torch", reason="the comparison needs torch and transformers")
transformers = pytest.importorskip("transformers", reason="the comparison needs transformers")

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64,
    # There the embedding of a padding token gets no gradient.
    "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"rope_theta": 5e4, "rms_norm_eps": 1e-5}),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama3": (
        "LlamaConfig",
        "LlamaForCausalLM",
        # Short enough that all three kinds of frequencies occur.
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ),
    "linear": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "yarn": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"rope_theta": 1e6}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_shares": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 20}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "mixtral_windows": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "sliding_window": 5},
    ),
    # Caps so low that they matter, windows shorter than the tokens.
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 8},
    ),
    "gemma3_stretched": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 17)).astype(np.int32)


def _theirs(name: str):
    """A random model of the family, with scales that are not 1."""
    config, model, extra = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**{**SIZES, **extra}, attn_implementation="eager")
    theirs = getattr(transformers, model)(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs.eval()


def _logits_of(theirs) -> np.ndarray:
    with torch.no_grad():
        return theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()


def _logits(folder) -> np.ndarray:
    model = build_model(published_model(folder))
    positions = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)

    def run(params):
        hidden, _ = forward(model, params, TOKENS, positions)
        return unembed(model, params, hidden)

    return np.asarray(jax.jit(run)(load_params(folder, model)))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_model_that_transformers_saved_are_its_own(name, tmp_path):
    theirs = _theirs(name)
    theirs.save_pretrained(tmp_path)

    ours = _logits(tmp_path)

    want = _logits_of(theirs)
    np.testing.assert_allclose(ours, want, rtol=0, atol=2e-4)
    np.testing.assert_array_equal(ours.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_what_was_saved_and_gives_the_same_logits(name, tmp_path):
    theirs = _theirs(name)
    theirs.save_pretrained(tmp_path / "theirs")
    model = build_model(published_model(tmp_path / "theirs"))

    save_params(tmp_path / "ours", model, load_params(tmp_path / "theirs", model))

    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    assert type(again) is type(theirs)
    np.testing.assert_array_equal(_logits_of(again), _logits_of(theirs))


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_and_gradients_equal_those_of_transformers(name, tmp_path):
    theirs = _theirs(name)
    theirs.save_pretrained(tmp_path / "theirs")
    model = build_model(published_model(tmp_path / "theirs"))
    params = load_params(tmp_path / "theirs", model)
    positions = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)

    def loss(params):
        logp, _ = sequence_logprobs(model, params, TOKENS, positions, None)
        return -logp[:, 1:].mean(), logp

    grads, logp = jax.jit(jax.grad(loss, has_aux=True))(params)
    # An export gives the gradients the names that the other side uses.
    save_params(tmp_path / "grads", model, grads)
    ours = load_file(tmp_path / "grads" / "model.safetensors")

    tokens = torch.tensor(TOKENS, dtype=torch.long)
    wanted = torch.log_softmax(theirs(tokens).logits[:, :-1], -1)
    wanted = wanted.gather(-1, tokens[:, 1:, None])[..., 0]
    (-wanted.mean()).backward()
    np.testing.assert_allclose(logp[:, 1:], wanted.detach().numpy(), rtol=0, atol=2e-4)
    # Some of its weights are fused in memory; saved, gradients have the names of the files.
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "theirs")
    named = load_file(tmp_path / "theirs" / "model.safetensors")
    assert set(ours) == set(named)
    for weight, grad in ours.items():
        want = named[weight]
        np.testing.assert_allclose(grad, want, rtol=0, atol=1e-3 * np.abs(want).max() + 1e-7)

"""Weights kept in the dtype of the computation give the same bits as those that are cast at use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.model import init_cache
from jaxrl.models.narrow import narrow, narrow_model

FAMILIES = {
    "plain": {},
    "norms and biases": {"qk_norm": True, "qkv_bias": True, "tie_embeddings": False},
    "gemma": {"norm_offset": True, "post_norms": True, "scale_embedding": True},
    "experts": {"n_experts": 4, "scan_layers": True},
    "adapters": {"lora_rank": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_weights_give_the_same_bits_as_wide_ones(make_model, run, run_logprobs, family):
    model, params = make_model(dtype="bfloat16", **FAMILIES[family])
    tokens = jnp.arange(16).reshape(2, 8) % 64
    cache = init_cache(model, 2, 16)
    narrow_params = narrow(params, narrow_model(model).abstract)

    def results(weights):
        segments = jnp.ones_like(tokens)
        positions = jnp.tile(jnp.arange(8), (2, 1))
        logp = run_logprobs(model, weights, tokens, positions, segments)
        return logp, run(model, weights, tokens, positions, cache=cache)

    wide, slim = results(params), results(narrow_params)

    for a, b in zip(jax.tree.leaves(wide), jax.tree.leaves(slim), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_narrow_model_keeps_scales_and_frozen_weights(make_model):
    model, params = make_model(dtype="bfloat16", lora_rank=2)
    dense, _ = make_model(dtype="bfloat16")

    of_adapters = narrow(params, narrow_model(model).abstract)["layers"]["0"]["attention"]
    of_dense = narrow_model(dense).abstract["layers"]["0"]

    assert of_adapters["query_lora"]["a"].dtype == jnp.bfloat16
    assert of_adapters["query"] is params["layers"]["0"]["attention"]["query"]
    assert of_dense["attention"]["query"].dtype == jnp.bfloat16
    assert of_dense["attention_norm"]["scale"].dtype == jnp.float32


def test_narrow_leaves_weights_alone_that_are_not_wider(make_model):
    model, params = make_model()

    assert narrow_model(model).abstract == model.abstract
    assert narrow(params, model.abstract) is params

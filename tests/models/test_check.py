"""A mesh that divides a model or its batches badly is refused with the numbers, before anything."""

from __future__ import annotations

import pytest

from jaxrl.config import ModelConfig
from jaxrl.errors import ConfigError
from jaxrl.models.check import check_mesh
from jaxrl.sharding import DEFAULT_RULES

SIZES = {
    "n_layers": 3, "d_model": 96, "n_heads": 12, "n_kv_heads": 4, "head_dim": 8,
    "mlp_dim": 48, "vocab_size": 60, "scan_layers": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sizes", "words"),
    [
        ({"n_heads": 6, "n_kv_heads": 2}, {"tensor": 4}, ["model.n_heads=6", "mesh.tensor=4"]),
        ({}, {"tensor": 6}, ["model.n_kv_heads=4 must be divisible by mesh.tensor=6"]),
        ({"vocab_size": 61}, {"tensor": 2}, ["model.vocab_size=61", "mesh.tensor=2"]),
        ({"mlp_dim": 50}, {"tensor": 4}, ["model.mlp_dim=50", "mesh.tensor=4"]),
        (
            {}, {"fsdp": 4, "context": 2, "expert": 5},
            ["model.d_model=96", "mesh.fsdp=4 x mesh.context=2 x mesh.expert=5 = 40"],
        ),
        ({"n_experts": 6}, {"expert": 4}, ["model.n_experts=6", "mesh.expert=4"]),
        (
            {"n_experts": 4}, {"tensor": 2, "expert_tensor": 16},
            ["model.mlp_dim=48", "mesh.tensor=2 x mesh.expert_tensor=16 = 32"],
        ),
    ],
)  # fmt: skip
def test_check_mesh_that_does_not_divide_the_model_error_gives_numbers(changes, sizes, words):
    config = ModelConfig(**(SIZES | changes))

    with pytest.raises(ConfigError) as caught:
        check_mesh(config, sizes)

    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"rows": 12}, "rows of a micro-batch=12 must be divisible by mesh.data=2 x mesh.fsdp=4"),
        ({"length": 33}, "row length=33 must be divisible by mesh.context=2"),
        ({"slots": 8}, "slots=8 must be divisible by mesh.data=2 x mesh.fsdp=4 x mesh.context=2"),
    ],
)
def test_check_mesh_that_does_not_divide_batches_error_gives_numbers(asked, words):
    with pytest.raises(ConfigError, match=words):
        check_mesh(ModelConfig(**SIZES), {"data": 2, "fsdp": 4, "context": 2}, **asked)


def test_check_mesh_layers_that_a_rule_splits_error_gives_numbers():
    rules = DEFAULT_RULES.replace({"layers": "data"})

    with pytest.raises(ConfigError, match=r"model.n_layers=3 must be divisible by mesh.data=2"):
        check_mesh(ModelConfig(**SIZES), {"data": 2}, rules=rules)


def test_check_mesh_lists_all_that_does_not_divide():
    with pytest.raises(ConfigError, match=r"n_heads=12 .*; model.n_kv_heads=4 .*; .*length=9"):
        check_mesh(ModelConfig(**SIZES), {"tensor": 5, "context": 2}, length=9)


def test_check_mesh_that_divides_everything_passes():
    sizes = {"data": 2, "fsdp": 2, "context": 2, "tensor": 2, "expert": 2, "expert_tensor": 2}

    check_mesh(ModelConfig(**SIZES, n_experts=4), sizes, rows=16, length=64, slots=32)
    check_mesh(ModelConfig(**SIZES), {"data": -1, "tensor": 2}, rows=7)

"""On eight CPU devices, every mesh trains to the numbers of one device, dense and with experts.

All in float32. Of each mesh the loss, the gradients (as Adam's first moment holds them) and the
updated weights are compared, after two updates: the second starts from what the first left.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
from train.train_cases import LENGTH, ROWS, VOCAB, make_batch, make_engine

from jaxrl.config import ModelConfig
from jaxrl.models.model import build_model
from jaxrl.sharding import AXES, make_mesh

SIZES = {
    "n_layers": 1, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8,
    "mlp_dim": 32, "vocab_size": VOCAB, "max_length": LENGTH, "qk_norm": True,
}  # fmt: skip
MODELS = {
    "dense": {},
    "experts": {"n_experts": 8, "experts_per_token": 2, "mlp_dim": 16},
    "windows": {
        "n_layers": 3, "sliding_window": 3, "global_every": 3, "attention_softcap": 5.0,
        "post_norms": True, "qkv_bias": True, "tie_embeddings": False,
    },
    "scanned": {
        "n_layers": 2, "sliding_window": 4, "global_every": 2, "scan_layers": True,
        "remat": "full", "logits_softcap": 4.0,
    },
    "adapters": {"lora_rank": 2, "lora_targets": ("query", "out")},
}  # fmt: skip


class Outcome(NamedTuple):
    """After two updates."""

    metrics: dict[str, float]
    first_moment: dict
    params: dict


@functools.cache
def outcome(kind: str, axes: tuple, packed: bool) -> Outcome:
    sizes = dict(axes)
    model = build_model(ModelConfig(**(SIZES | MODELS[kind])))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype), model.abstract
    )
    devices = jax.devices()[: math.prod(sizes.values())]
    engine = make_engine(model=model, params=params, mesh=make_mesh(**sizes, devices=devices))
    for seed in range(2):
        metrics = engine.update(make_batch(seed) if packed else padded_batch(seed))
    moment = optax.tree.get(engine.state.opt_state, "mu")
    on_host = jax.tree.map(np.asarray, (moment, engine.params))
    return Outcome({name: float(value) for name, value in metrics.items()}, *on_host)


def padded_batch(seed: int):
    """One sequence in each row, of different lengths; the last row is all padding."""
    batch = make_batch(seed)
    lengths = np.random.default_rng(seed).integers(2, LENGTH, ROWS)
    lengths[-1] = 0
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    inside = positions < lengths[:, None]
    mask = batch.loss_mask & inside & (positions > 0)
    return type(batch)(
        tokens=np.where(inside, batch.tokens, 0),
        positions=np.where(inside, positions, 0),
        segment_ids=inside.astype(np.int32),
        loss_mask=mask,
        loss_weights=np.where(mask, np.float32(1 / mask.sum()), np.float32(0)),
        advantages=batch.advantages,
        behavior_logp=np.where(mask, np.float32(-3), np.float32(0)),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def compare(kind: str, sizes: dict[str, int], *, packed: bool) -> None:
    got = outcome(kind, tuple(sizes.items()), packed)

    expected = outcome(kind, (), packed)
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5)
    for mine, theirs in zip(got[1:], expected[1:], strict=True):
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(mine), jax.tree.leaves(theirs), strict=True
        ):
            scale = float(np.abs(b).max())
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * scale, err_msg=str(path))


COMBINATIONS = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"data": 2, "expert": 4},
    {"fsdp": 2, "expert": 2, "expert_tensor": 2},
    {"context": 4, "expert": 2},
    {"tensor": 2, "expert": 2, "expert_tensor": 2},
    {"context": 2, "tensor": 2, "expert": 2},
    {"data": 2, "context": 2, "expert_tensor": 2},
    {"context": 2},
    {"fsdp": 8},
    {"expert_tensor": 4},
]
SINGLE = [{axis: 2} for axis in AXES]


def label(sizes: dict[str, int]) -> str:
    return " ".join(f"{axis}{size}" for axis, size in sizes.items())


@pytest.mark.parametrize(
    ("kind", "sizes", "packed"),
    [
        ("dense", {"fsdp": 2, "context": 2, "tensor": 2}, True),
        ("experts", {"fsdp": 2, "expert": 2, "expert_tensor": 2}, True),
        pytest.param(
            "experts", {"context": 2, "tensor": 2, "expert": 2}, False, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_update_on_a_mesh_equals_one_device(kind, sizes, packed):
    compare(kind, sizes, packed=packed)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("sizes", SINGLE + COMBINATIONS, ids=label)
def test_update_on_every_mesh_equals_one_device(kind, sizes, packed):
    compare(kind, sizes, packed=packed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "scanned", "adapters"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2, "context": 2, "tensor": 2},
        {"context": 4, "tensor": 2},
        {"data": 2, "expert": 2, "expert_tensor": 2},
    ],
    ids=label,
)
def test_update_of_other_layers_on_a_mesh_equals_one_device(kind, sizes):
    compare(kind, sizes, packed=True)

"""Compiles gradients of a training batch for a slice of TPU v5e chips with the real compiler, and
prints what the programs hold: a script of its own, because a process has one TPU library."""

from __future__ import annotations

import json
import math
import re
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxrl.config import ModelConfig
from jaxrl.distributed.hlo import Collective, collectives_in
from jaxrl.models.model import build_model, sequence_logprobs
from jaxrl.sharding import DEFAULT_RULES, make_mesh

LENGTH = 2048
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
SIZES = {
    "n_layers": 2, "d_model": 1024, "n_heads": 8, "n_kv_heads": 4, "head_dim": 128,
    "mlp_dim": 2048, "vocab_size": 8192, "max_length": LENGTH, "scan_layers": True,
    "remat": "full", "dtype": "bfloat16",
}  # fmt: skip
EXPERTS = {"n_experts": 16, "experts_per_token": 2, "mlp_dim": 512}
NARROW = {
    "d_model": 288, "n_heads": 9, "n_kv_heads": 3, "head_dim": 32, "mlp_dim": 768,
    "tie_embeddings": True, "scan_layers": False, "remat": "none", "dtype": "float32",
}  # fmt: skip
CASES = {
    "dense": ({}, {"fsdp": 2, "tensor": 2}),
    "narrow heads and windows": (
        {"head_dim": 64, "sliding_window": 512, "global_every": 2, "attention_softcap": 30.0},
        {"fsdp": 2, "tensor": 2},
    ),
    "narrow and unrolled": (NARROW, {"fsdp": 4}),
    "context": ({}, {"context": 2, "tensor": 2}),
    "experts": (EXPERTS, {"expert": 4}),
    "experts in parts": (EXPERTS, {"expert": 2, "expert_tensor": 2}),
    "experts whole": (EXPERTS, {"fsdp": 4}),
}


def compile_case(changes: dict, sizes: dict[str, int]) -> dict:
    """Gradients of the log-probabilities of 4 packed rows."""
    devices = list(topologies.get_topology_desc("v5e:2x2", platform="tpu").devices)
    mesh = make_mesh(**sizes, devices=devices)
    model = build_model(ModelConfig(**(SIZES | changes)))
    shardings = model.shardings(mesh)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.abstract,
        shardings,
    )
    split = DEFAULT_RULES.sharding(mesh, ("batch", "length"))
    row = jax.ShapeDtypeStruct((4, LENGTH), jnp.int32, sharding=split)

    def loss(params: dict, tokens: jax.Array, positions: jax.Array, segments: jax.Array):
        return sequence_logprobs(model, params, tokens, positions, segments, mesh=mesh)[0].mean()

    start = time.monotonic()
    program = jax.jit(jax.grad(loss), out_shardings=shardings)
    compiled = program.lower(params, row, row, row).compile()
    text = compiled.as_text()
    used = collectives_in(text)
    return {
        "kernels": len(re.findall(r"custom_call_target=\"tpu_custom_call\"", text)),
        "scores": _scores(text, SIZES["n_heads"] // sizes.get("tensor", 1)),
        "collectives": {kind: sum(one.kind == kind for one in used) for kind in COLLECTIVES},
        "largest sum": max(_numbers(one) for one in used if one.kind == "all-reduce"),
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "flops": compiled.cost_analysis()["flops"],
        "params": model.n_params,
        "seconds": time.monotonic() - start,
    }


def _scores(text: str, heads: int) -> int:
    """How many arrays have as many numbers as the scores of one row on a device."""
    shapes = re.findall(r"= \(?(?:f32|bf16)\[([\d,]+)\]", text)
    sizes = (math.prod(map(int, shape.split(","))) for shape in shapes)
    return sum(size >= heads * LENGTH * LENGTH for size in sizes)


def _numbers(one: Collective) -> int:
    """In the largest array of a collective."""
    return max(math.prod(shape) for shape in one.shapes)


def main() -> None:
    """Print one JSON object: case -> what its program holds."""
    names = sys.argv[1:] or list(CASES)
    sys.stdout.write(json.dumps({name: compile_case(*CASES[name]) for name in names}))


if __name__ == "__main__":
    main()

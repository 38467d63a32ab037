"""Compiles the engine's programs for a slice of 16 TPU v5e chips with the real compiler, and prints
what each of them holds and sends: a script of its own, because a process has one TPU library."""

from __future__ import annotations

import json
import math
import re
import sys

import jax
from jax.experimental import topologies

from jaxrl.config import ModelConfig
from jaxrl.inference.engine import Engine
from jaxrl.models.model import build_model
from jaxrl.sharding import make_mesh

SIZES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)


def engine() -> Engine:
    """64 slots of 1024 tokens over data=4, heads over tensor=4."""
    devices = topologies.get_topology_desc("v5e:4x4", platform="tpu").devices
    config = ModelConfig(
        n_layers=2, d_model=512, n_heads=8, n_kv_heads=4, head_dim=128, mlp_dim=1024,
        vocab_size=8192, max_length=1024, dtype="bfloat16", param_dtype="bfloat16",
    )  # fmt: skip
    mesh = make_mesh(data=4, tensor=4, devices=list(devices))
    sizes = {"prefill_buckets": (64,), "attend_buckets": (1024,), "top_logprobs": 2}
    return Engine(build_model(config), slots=64, max_length=1024, mesh=mesh, **sizes)


def largest_collective(text: str) -> int:
    """Bytes of the largest array that a collective gives to one device."""
    sizes = [0]
    for result, _ in COLLECTIVE.findall(text):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result):
            width = SIZES.get(dtype, 4)
            sizes.append(width * math.prod(int(n) for n in shape.split(",") if n))
    return max(sizes)


def main() -> None:
    """Print one JSON object."""
    made = engine()
    report = {"cache_bytes": made.cache_bytes, "programs": {}}
    report["param_bytes"] = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(made.model.abstract)
    )
    for key in (("prefill", 64), ("copy", 64), ("spread",), ("start",), ("generate", 1024)):
        compiled = made._program(*key)
        memory = compiled.memory_analysis()
        report["programs"][key[0]] = {
            "arguments": memory.argument_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "donated": memory.alias_size_in_bytes,
            "largest_collective": largest_collective(compiled.as_text()),
        }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()

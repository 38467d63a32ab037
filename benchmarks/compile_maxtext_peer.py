"""MaxText's own compile-only path on a benchmark's shape; run by `compile_peers.py`.

`python benchmarks/compile_maxtext_peer.py CASE FOLDER`, in an environment of its own: CASE is the
JSON of a case of `compile_peers.py`. Calls `maxtext.trainers.pre_train.train_compile` with the
case as its options, keeps the program that it compiles as text in FOLDER/program.hlo, and prints
the compiler's count of its memory as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import maxtext
from compile_cases import memory_of
from maxtext.trainers.pre_train import train_compile
from shapes import emit

NAMES = {"v5e:2x4": "v5e-8", "v5e:4x8": "v5e-32"}
"""Slices by MaxText's names."""


def options(case: dict) -> list[str]:
    """The case in MaxText's fields; all others as in its base.yml."""
    shape = case["shape"]
    fields = {
        "run_name": "compile",
        "base_output_directory": case["folder"],
        "compile_topology": NAMES[case["topology"]],
        "compile_topology_num_slices": 1,
        "ici_fsdp_parallelism": case["fsdp"],
        "ici_tensor_parallelism": case["tensor"],
        "per_device_batch_size": case["rows"] / (case["fsdp"] * case["tensor"]),
        "max_target_length": case["prompt"] + case["new"],
        "dtype": case["dtype"],
        "weight_dtype": case["param_dtype"],
        "grad_dtype": case["param_dtype"],
        "remat_policy": case["remat"],
        "scan_layers": case["scan"],
        "attention": case["attention"],
        "decoder_block": "llama2",
        "base_num_decoder_layers": shape["n_layers"],
        "base_emb_dim": shape["d_model"],
        "base_num_query_heads": shape["n_heads"],
        "base_num_kv_heads": shape["n_kv_heads"],
        "head_dim": shape["head_dim"],
        "base_mlp_dim": shape["mlp_dim"],
        "vocab_size": shape["vocab_size"],
        "logits_via_embedding": True,
        "rope_max_timescale": int(shape.get("rope_theta", 10_000)),
        "enable_dropout": False,
        "skip_jax_distributed_system": True,
    }
    return [f"{name}={str(value).lower()}" for name, value in fields.items()]


def main() -> None:
    """Let MaxText compile; write and print what it made."""
    case, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    case["folder"] = str(folder)
    made: list[Any] = []
    compiling = train_compile.jit_and_compile

    def kept(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        made.extend([compiling(*args, **kwargs), time.monotonic() - began])
        return made[0]

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    with mock.patch.object(train_compile, "jit_and_compile", kept):
        train_compile.main(["train_compile", str(base), *options(case)])
    compiled, seconds = made
    (folder / "program.hlo").write_text(compiled.as_text())
    emit({**memory_of(compiled), "compile_s": round(seconds, 1)})


if __name__ == "__main__":
    main()

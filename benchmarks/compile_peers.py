"""Training steps of jaxrl, google-tunix and MaxText, compiled for a TPU slice. Prints JSON.

`python benchmarks/compile_peers.py [--tunix-python PATH] [--maxtext-python PATH] [--cases NAME,..]`
with the Python of an environment that has google-tunix 0.1.7 or maxtext[tpu] 0.2.5, and the TPU
compiler on all sides: `jaxrl[tpu-compile]` here, the same libtpu there, or TPU_LIBRARY_PATH.
Nothing is run, no TPU is needed.

Against tunix it is the GRPO update, against MaxText the update on plain next-token loss, each with
the same model, batch, AdamW, dtypes, mesh and rematerialisation on both sides (`compile_cases.py`).
Of the compiled programs, on one device: bytes (arguments + outputs - aliased + temporary),
operations of matrix products, bytes of memory traffic and bytes sent in collectives; the last
three are counted in both texts by the same code. `--option model.FIELD=VALUE` or `logprob_chunk=N`
changes ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from compile_cases import CASES, memory_of
from shapes import emit

from jaxrl.planning import tpu_environment

FOLDER = Path(__file__).resolve().parent
COMPARED = ("bytes_mb", "gflops", "traffic_mb", "sent_mb")


def ours(case: dict, options: dict, folder: Path) -> dict:
    """Compile jaxrl's step, as `TrainEngine` runs it; write its text to the folder."""
    from jaxrl.config import AlgorithmConfig, ModelConfig, TrainConfig
    from jaxrl.models.model import build_model
    from jaxrl.planning.chips import parse_topology
    from jaxrl.planning.compiler import slice_devices
    from jaxrl.sharding import make_mesh
    from jaxrl.train.objectives import grpo_objective, sft_objective
    from jaxrl.train.optimizer import make_optimizer
    from jaxrl.train.step import lower_step

    chunk = options.get("logprob_chunk", TrainConfig().logprob_chunk)
    fields = {
        "dtype": case["dtype"],
        "param_dtype": case["param_dtype"],
        "remat": case["remat"],
        "scan_layers": case["scan"],
        **{k.removeprefix("model."): v for k, v in options.items() if k.startswith("model.")},
    }
    objective = (
        grpo_objective(AlgorithmConfig(), logprob_chunk=chunk)
        if case["peer"] == "tunix"
        else sft_objective(logprob_chunk=chunk)
    )
    devices = slice_devices(parse_topology(case["topology"]))
    began = time.monotonic()
    compiled = lower_step(
        build_model(ModelConfig(**{**case["shape"], **fields})),
        make_optimizer(TrainConfig(moment_dtype=case["param_dtype"])),
        objective,
        mesh=make_mesh(fsdp=case["fsdp"], tensor=case["tensor"], devices=devices),
        rows=case["rows"],
        length=case["prompt"] + case["new"],
    ).compile()
    seconds = time.monotonic() - began
    (folder / "program.hlo").write_text(compiled.as_text())
    return {**memory_of(compiled), "compile_s": round(seconds, 1)}


def theirs(case: dict, python: str, folder: Path) -> dict:
    """Let the peer compile its step and write its text to the folder."""
    script = str(FOLDER / f"compile_{case['peer']}_peer.py")
    environment = {**tpu_environment.ENVIRONMENT, **os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [python, script, json.dumps(case), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{case['peer']} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def counted(memory: dict, folder: Path) -> dict:
    """What the program in the folder needs on one device; megabytes and 10^9 operations."""
    from jaxrl.distributed.hlo import collectives_in
    from jaxrl.planning.hlo_costs import costs_of, not_taken

    text = (folder / "program.hlo").read_text()
    rare, sent, number = not_taken(text), {}, {}
    for one in collectives_in(text):
        if one.computation not in rare:
            sent[one.kind] = sent.get(one.kind, 0) + one.trips * one.sent_bytes
            number[one.kind] = number.get(one.kind, 0) + one.trips
    costs = costs_of(text)
    total = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporary"]
    return {
        "bytes_mb": round(total / 1e6, 1),
        **{f"{k}_mb": round(v / 1e6, 1) for k, v in memory.items() if k != "compile_s"},
        "gflops": round(costs.flops / 1e9, 2),
        "traffic_mb": round(costs.bytes / 1e6, 1),
        "sent_mb": round(sum(sent.values()) / 1e6, 2),
        "sent_mb_of": {kind: round(value / 1e6, 2) for kind, value in sorted(sent.items())},
        "collectives": dict(sorted(number.items())),
        "compile_s": memory["compile_s"],
    }


def compared(case: dict, options: dict, python: str, folder: Path) -> dict:
    """Both sides of a case, and ours divided by theirs; without `python`, ours alone."""
    sides = {}
    for name in ("jaxrl", case["peer"]) if python else ("jaxrl",):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        made = ours(case, options, place) if name == "jaxrl" else theirs(case, python, place)
        sides[name] = counted(made, place)
    if python:
        mine, other = sides.values()
        sides["ratio"] = {name: round(mine[name] / other[name], 3) for name in COMPARED}
    return sides


def option(text: str) -> tuple[str, object]:
    """ "model.scan_layers=true" -> ("model.scan_layers", True)."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main() -> None:
    """Compile, count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for peer in ("tunix", "maxtext"):
        parser.add_argument(f"--{peer}-python", default="", help="empty: ours alone")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rows", type=int, default=0, help="instead of those of the cases")
    parser.add_argument("--option", action="append", default=[], type=option)
    parser.add_argument("--keep", default="", help="folder in which the texts are left")
    args = parser.parse_args()
    tpu_environment.prepare()
    pythons = {"tunix": args.tunix_python, "maxtext": args.maxtext_python}
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.cases.split(","):
            case = {**CASES[name], "rows": args.rows or CASES[name]["rows"]}
            folder = Path(args.keep or temporary).absolute() / name
            results[name] = compared(case, dict(args.option), pythons[case["peer"]], folder)
            results[name]["tokens"] = case["rows"] * (case["prompt"] + case["new"])
    shown = {name: value for name, value in vars(args).items() if not name.endswith("python")}
    emit({"benchmark": "compile_peers", "args": shown, **results})


if __name__ == "__main__":
    main()

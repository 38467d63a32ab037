"""SmolLM2-135M in jaxrl against torch and transformers, in one run, in turn. Prints JSON.

`python benchmarks/compare_torch.py [--peer-python PATH] [--gguf FILE] [--rounds N]`. PATH is the
interpreter of an environment with the extra `interop` (default: this one). Compared are an update
of 8 rows of 128 tokens with AdamW in float32, and the loading of the weights: a folder of
safetensors with random weights in float32, and the GGUF file. Every measurement is a process of its
own; loading counts from before the weights are opened until all of them have been read once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from shapes import emit

FOLDER = Path(__file__).resolve().parent


def run(python: str, *args: str) -> dict:
    """The JSON that a script prints in its last line."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    paths = [str(FOLDER.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [python, str(FOLDER / args[0]), *args[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{args[0]} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare_steps(peer: str, rounds: int) -> dict:
    """Tokens per second of an update; the peer with one thread and with two."""
    ours, theirs = [], {1: [], 2: []}
    for _ in range(rounds):
        ours.append(run(sys.executable, "smollm2_step.py", "--repeats", "2")["smollm2_step"])
        for threads, results in theirs.items():
            options = ("--repeats", "2", "--threads", str(threads))
            results.append(run(peer, "torch_peer.py", "step", *options)["smollm2_step"])
    record = {"jaxrl": _median(ours)}
    for threads, results in theirs.items():
        record[f"torch_{threads}_threads"] = _median(results)
        record[f"ratio_to_{threads}_threads"] = _median(
            [{name: a[name] / b[name] for name in a} for a, b in zip(ours, results, strict=True)]
        )
    return record


def compare_loading(peer: str, rounds: int, path: str) -> dict:
    """Seconds of loading `path`, and by how much the peer takes longer."""
    file = Path(path)
    at = (
        ("--path", path)
        if file.is_dir()
        else ("--path", str(file.parent), "--gguf-file", file.name)
    )
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(run(sys.executable, "load_weights.py", "--folder", path))
        theirs.append(run(peer, "torch_peer.py", "load", *at))
    names = ("cpu_seconds", "wall_seconds")
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "jaxrl": _median([{n: result[n] for n in names} for result in ours]),
        "transformers": _median([{n: result[n] for n in names} for result in theirs]),
        "ratio": _median([{n: b[n] / a[n] for n in names} for a, b in pairs]),
    }


def _median(records: list[dict[str, float]]) -> dict[str, float]:
    return {n: round(statistics.median(r[n] for r in records), 3) for n in records[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--gguf")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        write_random_weights(folder)
        result["load_safetensors"] = compare_loading(args.peer_python, args.rounds, folder)
    if args.gguf:
        result["load_gguf"] = compare_loading(args.peer_python, args.rounds, args.gguf)
    result["step"] = compare_steps(args.peer_python, args.rounds)
    emit({"benchmark": "compare_torch", "rounds": args.rounds, **result})


def write_random_weights(folder: str) -> None:
    """Random weights of SmolLM2-135M's shape as a Hugging Face folder."""
    from jaxrl.config import preset
    from jaxrl.models.model import build_model, init_params
    from jaxrl.models.safetensors import save_params

    model = build_model(preset("smollm2-135m"))
    save_params(folder, model, init_params(model, 0))


if __name__ == "__main__":
    main()

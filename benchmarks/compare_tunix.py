"""jaxrl against google-tunix in one run: each script in turn, round after round. Prints JSON.

`python benchmarks/compare_tunix.py --peer-python PATH [--rounds N] [--smollm2]`. PATH is the
interpreter of an environment of its own with `google-tunix==0.1.7` in it (Python 3.12):

    python3.12 -m venv .venv-tunix && .venv-tunix/bin/pip install google-tunix==0.1.7

`--smollm2`: the update of SmolLM2-135M alone.

Rounds alternate because the speed of a shared machine drifts; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from shapes import GROUP_SIZE, GROUPS, LENGTH, emit, measure

FOLDER = Path(__file__).resolve().parent
OURS = ("sampler.py", "train_step.py", "iteration.py", "smollm2_step.py")
GOALS = {
    "greedy": 3.0,
    "temperature_1": 3.0,
    "train_step": 1.5,
    "iteration": 2.0,
    "smollm2_step": 1.0,
}
MATRIX = 1024


def run(python: str, script: str, *args: str) -> dict:
    """The JSON that a script prints in its last line."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(FOLDER.parent) if python == sys.executable else ""
    done = subprocess.run(
        [python, str(FOLDER / script), *args], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def matmul_gflops() -> float:
    """GFLOP per second of wall time of a large fp32 product: the roof at this moment."""
    import jax
    import jax.numpy as jnp

    product = jax.jit(lambda a: a @ a)
    operand = jnp.ones((MATRIX, MATRIX), jnp.float32)

    def work() -> int:
        for _ in range(8):
            result = product(operand)
        result.block_until_ready()
        return 8 * 2 * MATRIX**3

    return measure(work, 5)["tokens_per_wall_second"] / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smollm2", action="store_true", help="the update of SmolLM2-135M alone")
    args = parser.parse_args()
    ours, peer, roofs = [], [], []
    scripts = OURS[-1:] if args.smollm2 else OURS
    asked = ("--only", "smollm2_result") if args.smollm2 else ()
    for _ in range(args.rounds):
        roofs.append(matmul_gflops())
        merged = {}
        for script in scripts:
            merged |= run(sys.executable, script, "--repeats", "3")
        ours.append(merged)
        peer.append(run(args.peer_python, "tunix_peer.py", "--repeats", "3", *asked))
    emit(
        {
            "benchmark": "compare_tunix",
            "tokens_per_update": GROUPS * GROUP_SIZE * LENGTH,
            "matmul_gflops": [round(roof) for roof in roofs],
            **{name: compared(name, ours, peer) for name in GOALS if name in ours[0]},
        }
    )


def compared(name: str, ours: list[dict], peer: list[dict]) -> dict:
    """Medians of both sides, and of the ratio of each round."""
    record: dict = {"goal": GOALS[name]}
    for kind in ("tokens_per_cpu_second", "tokens_per_wall_second"):
        pairs = [(a[name][kind], b[name][kind]) for a, b in zip(ours, peer, strict=True)]
        record[kind] = {
            "jaxrl": statistics.median(a for a, _ in pairs),
            "tunix": statistics.median(b for _, b in pairs),
            "ratio": round(statistics.median(a / b for a, b in pairs), 2),
            "ratios": [round(a / b, 2) for a, b in pairs],
        }
    return record


if __name__ == "__main__":
    main()

"""Host memory and time of loading published weights: the shape of SmolLM2-135M, float32.

`python benchmarks/load_weights.py [--preset NAME]`: random weights are written to a temporary
folder and loaded by a fresh process. The memory that counts is anonymous (pages of the mapped file
are the system's), above what the process had before and the weights themselves. Prints JSON.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import jax
from shapes import emit, now

from jaxrl.config import preset, published_model
from jaxrl.models.model import build_model, init_params
from jaxrl.models.safetensors import load_params, save_params


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The largest `anonymous_bytes` while it is open, looked at every millisecond."""

    def __enter__(self) -> Peak:
        self.bytes, self._done = anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, anonymous_bytes())


def load(folder: str) -> None:
    """Load and print."""
    before, start = anonymous_bytes(), now()
    with Peak() as peak:
        model = build_model(published_model(folder))
        params = jax.block_until_ready(load_params(folder, model))
    cpu, wall = (end - begin for begin, end in zip(start, now(), strict=True))
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
    emit(
        {
            "benchmark": "load_weights",
            "params_mb": round(sum(sizes) / 1e6, 1),
            "largest_tensor_mb": round(max(sizes) / 1e6, 1),
            "peak_above_params_mb": round((peak.bytes - before - sum(sizes)) / 1e6, 1),
            "cpu_seconds": round(cpu, 3),
            "wall_seconds": round(wall, 3),
        }
    )


def main() -> None:
    """Write the weights, and load them in another process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="smollm2-135m")
    parser.add_argument("--folder", help="load this folder instead")
    args = parser.parse_args()
    if args.folder:
        load(args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(preset(args.preset))
        save_params(folder, model, init_params(model, 0))
        subprocess.run([sys.executable, __file__, "--folder", folder], check=True)


if __name__ == "__main__":
    main()

"""Compile the runs of configs/slices for their slices, and write the table of docs/planning.md.

python tools/slices_table.py            all of them: minutes each, about 3 GB of memory
python tools/slices_table.py NAME ...   some of them; the other rows stay

Needs the extra `tpu-compile`, or TPU_LIBRARY_PATH. The compiler's own settings are taken as they
are: JAX_OPTIMIZATION_LEVEL=O1 takes a third of the time, but its programs are not those that run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from jaxrl.planning.report import axes_text

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- table of configs/slices -->", "<!-- end of the table -->"
HEAD = [
    "| config | slice, mesh | tokens of an update | memory of the run, planned | update | "
    "utilisation | network | sampling | decoding, a token |",
    "|---|---|---|---|---|---|---|---|---|",
]
GIB = 2**30


def configs() -> dict[str, Path]:
    """Name -> file of each large run."""
    return {path.stem: path for path in sorted((ROOT / "configs" / "slices").glob("*.py"))}


def topology_of(path: Path) -> str:
    """The slice that a config is made for, as its head says."""
    return re.search(r"--topology=(\S+)", path.read_text(encoding="utf-8")).group(1)


def jaxrl(*arguments: str) -> dict:
    """The record that a command prints; its exit code may be 1 for a run that does not fit."""
    command = [sys.executable, "-m", "jaxrl", *arguments, "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}")
    return json.loads(done.stdout)


def row(name: str, compiled: dict, planned: dict) -> str:
    """One row of the table."""
    programs = {program["name"]: program for program in compiled["programs"]}
    train, decode = programs["train"], programs["decode"]
    mesh = axes_text(compiled["mesh"])
    hosts = f"{compiled['processes']} hosts, {axes_text(compiled['sampler_mesh'])}"
    peak, limit = compiled["peak_bytes"] / GIB, compiled["limit_bytes"] / GIB
    steps = decode["steps"]
    cells = [
        f"[{name}](../configs/slices/{name}.py)",
        f"{compiled['place']}, {mesh}",
        f"{train['tokens']:,}",
        f"{peak:.1f} of {limit:.1f} GiB, {planned['peak_bytes'] / GIB:.1f}",
        f"{train['fastest_s']:.2f} to {train['slowest_s']:.2f} s",
        f"{100 * train['utilisation_at_most']:.0f} to "
        f"{100 * train['utilisation_without_overlap']:.0f} %",
        f"{train['network_s']:.2f} s",
        hosts,
        f"{1000 * decode['fastest_s'] / steps:.1f} to {1000 * decode['slowest_s'] / steps:.1f} ms",
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str]) -> int:
    """Compile what is named, and put its rows into the page."""
    known = configs()
    unknown = [name for name in argv[1:] if name not in known]
    if unknown:
        raise SystemExit(f"there is no {unknown[0]!r}; there are {', '.join(known)}")
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    old = {
        m.group(1): line for line in table.splitlines() if (m := re.match(r"\| \[(\w+)\]", line))
    }
    for name in argv[1:] or known:
        flags = f"--config={known[name]}", f"--topology={topology_of(known[name])}"
        old[name] = row(name, jaxrl("compile", *flags), jaxrl("plan", *flags))
        rows = [old[each] for each in known if each in old]
        page = "\n".join([before + BEGIN, *HEAD, *rows, END + after])
        PAGE.write_text(page, encoding="utf-8")  # at once: the next one takes minutes
        print(old[name], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

"""Resolve constraints.txt anew: `python tools/update_constraints.py PYTHON3.11 [PYTHON3.12]`.

Installs the extras `dev` and `tpu-compile` without constraints in a fresh environment of each
interpreter and writes the versions found. Where the two differ, a line carries an environment
marker. The file holds names and versions only, so it works with any package index.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = """\
# Exact versions that the tests run with: the oldest supported JAX on Python 3.11, the newest on
# 3.12 and later.
# Regenerate with `make constraints` after a change of pyproject.toml.
"""
SPLIT = "3.12"


def resolve(python: str) -> dict[str, str]:
    """Package name -> version of a fresh environment with the extras `dev` and `tpu-compile`."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", "--editable", ".[dev,tpu-compile]"], check=True)
        freeze = [*pip, "freeze", "--exclude-editable"]
        frozen = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
    return dict(line.split("==") for line in frozen.splitlines() if "==" in line)


def merge(oldest: dict[str, str], newest: dict[str, str]) -> list[str]:
    """Constraint lines; a marker only where the two resolutions differ."""
    lines = []
    for name in sorted(oldest | newest, key=str.lower):
        old, new = oldest.get(name), newest.get(name)
        if old == new:
            lines.append(f"{name}=={old}")
            continue
        if old is not None:
            lines.append(f'{name}=={old}; python_version < "{SPLIT}"')
        if new is not None:
            lines.append(f'{name}=={new}; python_version >= "{SPLIT}"')
    return lines


def main(argv: list[str]) -> int:
    """Write constraints.txt from one or two interpreters."""
    resolutions = [resolve(python) for python in argv[1:3]]
    lines = merge(resolutions[0], resolutions[-1])
    Path("constraints.txt").write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

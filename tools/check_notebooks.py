"""Refuse notebooks that carry outputs or execution counts.

`python tools/check_notebooks.py [NOTEBOOK ...]`; without arguments, every notebook below docs/.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def problems(path: Path) -> list[str]:
    """One line for each code cell of the notebook at `path` that was saved with results in it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [
        f"{path}: cell {index} carries outputs; clear them before committing"
        for index, cell in enumerate(cells)
        if cell["cell_type"] == "code" and (cell.get("outputs") or cell.get("execution_count"))
    ]


def main(argv: list[str]) -> int:
    """Check the named notebooks (default: all of docs/); 0 when none carries outputs."""
    paths = [Path(name) for name in argv[1:]] or sorted(Path("docs").rglob("*.ipynb"))
    found = [line for path in paths for line in problems(path)]
    for line in found:
        print(line, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv))

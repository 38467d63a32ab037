"""Every example of docs/sharding.md runs as it stands, by itself, on eight devices."""

from __future__ import annotations

import re
import subprocess
import sys

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

_RUNNER = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from pathlib import Path
import re
page = Path(sys.argv[1]).read_text(encoding="utf-8")
blocks = re.findall(r"^```python\\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
for i, block in enumerate(blocks, start=1):
    # A namespace of its own: each example must stand alone.
    space = {"__name__": f"example_{i}"}
    exec(compile(block, f"example {i} of {sys.argv[1]}", "exec"), space)
    if "table" in space:
        print(space["table"])
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("jaxrl.")}
assert rooms == {"sharding"}, rooms
foreign = {"flax", "optax", "chex"} & set(sys.modules)
assert not foreign, foreign
print(len(blocks), "examples")
"""


def test_sharding_page_every_example_runs_and_shows_its_real_output(repo_root):
    page = repo_root / "docs" / "sharding.md"
    shown = dict(_BLOCK.findall(page.read_text(encoding="utf-8")))["text"]

    result = subprocess.run(
        [sys.executable, "-c", _RUNNER, str(page)],
        capture_output=True, text=True, cwd=repo_root, timeout=300,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    *table, count = result.stdout.splitlines()
    assert count == "5 examples"
    assert [line.split() for line in table] == [line.split() for line in shown.splitlines()]

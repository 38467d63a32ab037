"""The examples of docs/rollout.md and docs/workflows.md run as they stand."""

from __future__ import annotations

import re

import pytest

_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "examples"), [("rollout.md", 1), ("workflows.md", 2)])
def test_page_examples_run_in_order(repo_root, page, examples):
    blocks = _EXAMPLE.findall((repo_root / "docs" / page).read_text(encoding="utf-8"))
    space = {"__name__": "example"}

    for block in blocks:
        exec(compile(block, page, "exec"), space)

    assert len(blocks) == examples

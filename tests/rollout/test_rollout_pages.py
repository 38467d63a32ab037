"""The examples of docs/rollout.md and docs/workflows.md run as they stand."""

from __future__ import annotations

import re

import pytest
from data.chat_cases import TEMPLATES, byte_tokenizer

_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "examples"), [("rollout.md", 1), ("workflows.md", 4)])
def test_page_examples_run_in_order(repo_root, page, examples, tmp_path, monkeypatch):
    chat = {"default": TEMPLATES["qwen3"]}
    byte_tokenizer("qwen3", chat_templates=chat).save(tmp_path / "models" / "chat")
    monkeypatch.chdir(tmp_path)
    blocks = _EXAMPLE.findall((repo_root / "docs" / page).read_text(encoding="utf-8"))
    space = {"__name__": "example"}

    for block in blocks:
        exec(compile(block, page, "exec"), space)

    assert len(blocks) == examples

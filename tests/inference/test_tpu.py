"""The engine's programs on a TPU slice, checked with the TPU compiler on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tpu_compiler import report_of


@pytest.mark.slow
def test_programs_for_a_slice_split_the_cache_donate_it_and_never_gather_it():
    report = report_of(Path(__file__).with_name("tpu_programs.py"))

    cache, programs = report["cache_bytes"] // 16, report["programs"]
    for name in ("copy", "spread", "generate"):
        assert programs[name]["donated"] >= cache, name
    # A sixteenth of the cache, a quarter of the weights (heads and vocabulary; norms are whole).
    assert programs["generate"]["arguments"] <= cache + report["param_bytes"] // 4 + 2**20
    for name, program in programs.items():
        # Keys of one layer are a quarter of the cache: twice this. Blocks of one slot are small.
        assert program["largest_collective"] < cache // 8, name
        assert program["temporary"] < cache // 2, name

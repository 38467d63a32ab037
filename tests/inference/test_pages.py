"""Large pages under the weights: the numbers stay, and small trees are left alone."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.inference import pages
from jaxrl.inference.pages import use_large_pages

_MEBIBYTE = 1 << 20


def _weights() -> dict[str, jax.Array]:
    """80 MiB in arrays that begin and end in the middle of pages."""
    shape = (1000, 1000)
    return {str(i): jnp.full(shape, float(i)) for i in range(80 * _MEBIBYTE // (4 * 10**6) + 1)}


def _on_large_pages() -> int:
    """Bytes of this process that lie on large pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"AnonHugePages:\s+(\d+) kB", text)[1]) * 1024


def test_large_pages_leave_every_number_as_it_is():
    weights = _weights()

    use_large_pages(weights)

    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, np.full((1000, 1000), float(name), np.float32))


def test_large_pages_under_weights_are_really_there():
    weights = _weights()

    done = use_large_pages(weights)

    if not done:
        pytest.skip("this system gives no large pages")
    assert done >= 40 * _MEBIBYTE
    # Not the difference: the allocator may have given memory that lay on large pages already.
    assert _on_large_pages() >= done


def test_large_pages_of_a_small_tree_or_a_system_without_them_are_none(tmp_path, monkeypatch):
    assert use_large_pages({"a": jnp.ones(100)}) == 0
    assert use_large_pages({}) == 0

    monkeypatch.setattr(pages, "_FOLDER", tmp_path)
    weights = _weights()
    assert use_large_pages(weights) == 0

    (tmp_path / "hpage_pmd_size").write_text("2097152")
    (tmp_path / "enabled").write_text("always madvise [never]")
    assert use_large_pages(weights) == 0

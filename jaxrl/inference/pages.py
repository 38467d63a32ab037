"""Large memory pages for the weights that decoding on a CPU reads again at every step.

With pages of 4 KiB a good part of the time goes into finding out where the next page lies. This
only tells the operating system how to hold the memory: no number changes and no array moves.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import jax

_FOLDER = Path("/sys/kernel/mm/transparent_hugepage")
_ADVISE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE, and MADV_COLLAPSE of Linux 6.1 and later
_WORTH_IT = 64 << 20  # bytes; less fits into processors' caches


def use_large_pages(tree: Any) -> int:
    """Ask for large pages under the arrays of `tree` on CPU devices -> bytes that lie on them now.

    Where the system has none, or does not let programs ask for them, nothing happens: 0. Costs
    about two seconds for each gigabyte the first time. Does not hold Python's lock.
    """
    shards = [
        shard.data
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device.platform == "cpu"
    ]
    size = _page_size()
    if not size or sum(shard.nbytes for shard in shards) < _WORTH_IT:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done = 0
    # Arrays lie side by side: a page under the end of one holds the beginning of the next.
    for page in sorted({page for shard in shards for page in _pages(shard, size)}):
        madvise(page * size, size, _ADVISE)
        # It fails where a part of the page belongs to nobody; small pages are kept there.
        done += size * (madvise(page * size, size, _COLLAPSE) == 0)
    return done


def _page_size() -> int:
    """Bytes of a large page; 0 where programs cannot ask for them."""
    if sys.platform != "linux":
        return 0
    try:
        allowed = "[never]" not in (_FOLDER / "enabled").read_text()
        return int((_FOLDER / "hpage_pmd_size").read_text()) if allowed else 0
    except (OSError, ValueError):
        return 0


def _pages(array: jax.Array, size: int) -> range:
    """Numbers of the large pages that hold a part of an array on one device."""
    start = array.unsafe_buffer_pointer()
    return range(start // size, (start + max(array.nbytes, 1) - 1) // size + 1)

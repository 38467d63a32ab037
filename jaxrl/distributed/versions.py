"""What identifies the code that a process runs."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

import jax
import jaxlib

import jaxrl


@functools.cache
def source_digest(folder: Path | None = None) -> str:
    """SHA-256, 16 hex digits, of all Python files below `folder` (None: the package jaxrl)."""
    root = Path(jaxrl.__file__).parent if folder is None else folder
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of what decides which programs are compiled, and the digest of our source code."""
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "jaxrl": jaxrl.__version__,
        "code of jaxrl": source_digest(),
    }

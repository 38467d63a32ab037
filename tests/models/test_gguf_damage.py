"""Damaged GGUF files: whatever is wrong is an error of ours, quickly and with little memory."""

from __future__ import annotations

import math

import gguf_files
import jax
import numpy as np
import pytest

from jaxrl.config import published_model
from jaxrl.errors import JaxrlError
from jaxrl.models.gguf import load_gguf
from jaxrl.models.model import build_model


def _refusal(path):
    """Why the file is refused, loading it as a user would; "" where it is not."""
    try:
        model = build_model(published_model(path))
        jax.block_until_ready(load_gguf(path, model))
    except JaxrlError as error:
        return str(error)
    return ""


def _tiny_header():
    """Bytes before the numbers of the tiny file."""
    numbers = sum(-(-4 * math.prod(shape) // 32) * 32 for shape in gguf_files.TINY_SHAPES.values())
    return len(gguf_files.tiny()) - numbers


def test_file_cut_off_anywhere_is_refused(tmp_path):
    whole = gguf_files.tiny()
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    assert not _refusal(path)

    for length in [*range(0, _tiny_header(), 3), *range(_tiny_header(), len(whole) - 32, 71)]:
        path.write_bytes(whole[:length])

        assert str(path) in _refusal(path), length


def _damage(path, places, rng):
    """Change single bytes at `places` of the tiny file, one after the other; how often refused."""
    whole = gguf_files.tiny()
    refused = 0
    for at in places:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8)) if at % 2 else int(rng.integers(1, 256))
        path.write_bytes(damaged)
        why = _refusal(path)
        assert not why or str(path) in why or "model." in why
        refused += bool(why)
    return refused


def test_damaged_bytes_are_refused_or_only_change_numbers(tmp_path):
    rng = np.random.default_rng(0)

    refused = _damage(tmp_path / "m.gguf", rng.integers(0, _tiny_header(), 250), rng)

    assert refused > 180


@pytest.mark.slow
def test_every_damaged_byte_is_refused_or_only_changes_numbers(tmp_path):
    rng = np.random.default_rng(1)

    for _ in range(4):
        _damage(tmp_path / "m.gguf", range(len(gguf_files.tiny())), rng)

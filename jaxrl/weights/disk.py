"""What the stores on disk share: quiet Orbax, directories whole or absent, clear errors."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxrl.errors import CheckpointError, JaxrlError, OutputError
from jaxrl.weights.digest import named_leaves

Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Leaf name -> (shape, dtype)."""

_DELETED_SUFFIX = ".deleted"
_UNFINISHED_SUFFIX = ".orbax-checkpoint-tmp"
_ATTEMPTS, _PAUSE_S = 50, 0.1
_SHOWN = 8  # differing tensors that a message lists

_SYSTEM_ERRORS = tuple(
    os.strerror(code)
    for code in (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO,
        errno.ENOTDIR, errno.EMFILE,
    )
)  # fmt: skip


class _OrbaxFilter(logging.Filter):
    """Drops what Orbax logs through absl: each of its failures also reaches us as an exception."""

    def filter(self, record: logging.LogRecord) -> bool:
        # The record names a line within absl, so the caller has to be looked for.
        frame = sys._getframe()
        for _ in range(_FRAMES):
            if frame is None:
                return True
            if _ORBAX in frame.f_code.co_filename:
                return False
            frame = frame.f_back
        return True


_ORBAX = f"orbax{os.sep}checkpoint"
_FRAMES = 15
_FILTER = _OrbaxFilter()


def quiet_orbax() -> None:
    """Keep Orbax's progress messages out of the run's output; may be called again."""
    # addFilter ignores a filter that is there already.
    logging.getLogger("absl").addFilter(_FILTER)


def complete_steps(folder: Path, marker: str) -> list[int]:
    """Numbers of the directories in `folder` that were written to their end, ascending.

    A directory gets its plain number as name when all of it is on disk. `marker` is a file that
    each must hold; one without it was put there by something else.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OutputError(f"cannot read {folder}: {error.strerror}") from error
    return sorted(int(n) for n in names if _is_number(n) and (folder / n / marker).is_file())


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents; raises `OutputError` where that is not possible."""
    with output_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def remove_step(folder: Path, step: int) -> None:
    """Delete the directory of `step`; a reader or a crash never sees a part of it as a whole."""
    if jax.process_index() != 0:
        return  # all processes share the directory
    doomed = folder / f"{step}{_DELETED_SUFFIX}"
    with output_errors(folder / str(step)):
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(folder / str(step), doomed)
        shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Delete what killed processes left half-written or half-deleted; for the one writer."""
    if jax.process_index() != 0 or not folder.is_dir():
        return
    with output_errors(folder):
        for entry in folder.iterdir():
            number, _, rest = entry.name.partition(".")
            if _is_number(number) and f".{rest}" in (_DELETED_SUFFIX, _UNFINISHED_SUFFIX):
                _remove_tree(entry)


def _remove_tree(folder: Path) -> None:
    """Delete `folder`; threads of a failed save may still be putting files into it for a while."""
    for _ in range(_ATTEMPTS):
        try:
            return shutil.rmtree(folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            time.sleep(_PAUSE_S)
    return shutil.rmtree(folder)


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write into `OutputError` that names `path`."""
    try:
        yield
    except JaxrlError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    except Exception as error:
        # TensorStore reports the system's errors as text, within errors of other types.
        reasons = [text for text in _SYSTEM_ERRORS if text in str(error)]
        if not reasons:
            raise
        raise OutputError(f"cannot write {path}: {reasons[0]}") from error


@contextmanager
def input_errors(path: Path) -> Iterator[None]:
    """Turn whatever reading a damaged directory raises into `CheckpointError` that names `path`."""
    try:
        yield
    except (JaxrlError, MemoryError):
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"cannot read {path}: {reason[0][:300] if reason else type(error).__name__}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `FileNotFoundError`; `CheckpointError` if damaged."""
    text = path.read_bytes()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"cannot read {path}: it holds a {type(value).__name__}, not an object"
        )
    return value


def tensors_of(tree: Any) -> Tensors:
    """Shape and dtype of each leaf of a tree of arrays or `jax.ShapeDtypeStruct`."""
    return {n: (tuple(x.shape), str(x.dtype)) for n, x in named_leaves(tree).items()}


def tensors_to_json(tensors: Tensors) -> dict[str, list]:
    """The form in which `tensors_from_json` reads it."""
    return {name: [list(shape), dtype] for name, (shape, dtype) in tensors.items()}


def tensors_from_json(value: Mapping[str, Any]) -> Tensors:
    """The inverse of `tensors_to_json`."""
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in value.items()}


def check_tensors(stored: Tensors, wanted: Tensors, source: str) -> None:
    """Raise `CheckpointError` that names each tensor in which the two differ, and how."""
    lines = []
    for name in sorted(stored.keys() | wanted.keys()):
        if name not in stored:
            lines.append(f"{name!r} is not stored; the model has {_shown(wanted[name])}")
        elif name not in wanted:
            lines.append(f"{name!r} is stored as {_shown(stored[name])}; the model has none")
        elif stored[name] != wanted[name]:
            lines.append(
                f"{name!r} is stored as {_shown(stored[name])}; "
                f"the model has {_shown(wanted[name])}"
            )
    if lines:
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        listed = "\n  ".join(lines[:_SHOWN] + more)
        raise CheckpointError(f"{source} does not fit the model:\n  {listed}")


def with_shardings(abstract: Any, shardings: Any | Sharding | None) -> Any:
    """Tree of `jax.ShapeDtypeStruct` like `abstract` (arrays or structs) that all have shardings.

    `shardings` is a tree of them, one for all, or None: those of the leaves, else the first device.
    """
    leaves, treedef = jax.tree.flatten(abstract)
    if shardings is None:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        targets = [getattr(leaf, "sharding", None) or default for leaf in leaves]
    elif isinstance(shardings, Sharding):
        targets = [shardings] * len(leaves)
    else:
        targets = treedef.flatten_up_to(shardings)
    return treedef.unflatten(
        jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=target)
        for leaf, target in zip(leaves, targets, strict=True)
    )


def _is_number(name: str) -> bool:
    """A plain number as `str` writes it: no signs, no leading zeros."""
    return name.isascii() and name.isdigit() and str(int(name)) == name


def _shown(tensor: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = tensor
    return f"{dtype}{list(shape)}"

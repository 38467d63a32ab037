"""`jaxrl convert`: weights of a run, or published ones, as a folder that other libraries load."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl.cli import output
from jaxrl.cli.published import load_weights, open_parts
from jaxrl.errors import OutputError
from jaxrl.models.safetensors import save_params

_PARTS = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates",
)
"""What readers of a folder look for: one that is there already would be mixed with the new ones."""


def run(args: Any) -> int:
    """Write weights, config.json and tokenizer; prints the folder. Returns the exit code."""
    folder = Path(args.options.to)
    _refuse_mixing(folder)
    parts = open_parts(args)
    params, version = load_weights(args, parts)
    with _staged(folder) as stage:
        parts.tokenizer.save(stage)
        save_params(stage, parts.model, params)
    output.report(f"weights {version}\n")
    output.write(f"{folder}\n")
    return 0


def _refuse_mixing(folder: Path) -> None:
    for name in _PARTS:
        if os.path.lexists(folder / name):
            raise OutputError(f"{folder} already holds {name}; choose another --to")


@contextlib.contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A folder inside `folder`, whose content goes there at the end if all went well.

    config.json comes last: without it nobody takes the folder for a model.
    """
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    except OSError as error:
        raise OutputError(f"cannot write --to={folder}: {error.strerror or error}") from None
    try:
        yield stage
        _move(stage, folder)
    except OutputError:
        raise  # it is an OSError, too, and says already what could not be written
    except OSError as error:
        raise OutputError(f"cannot write --to={folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # not while it holds something


def _move(stage: Path, folder: Path) -> None:
    """Move everything; of two processes that write the same folder only one does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        _refuse_mixing(folder)
        names = sorted(os.listdir(stage), key=lambda name: (name == "config.json", name))
        for name in names:
            os.rename(stage / name, folder / name)
    finally:
        os.close(handle)

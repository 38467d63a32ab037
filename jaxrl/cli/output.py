"""What commands write. Standard output: a reader that left is no error, a full disk is one."""

from __future__ import annotations

import contextlib
import os
import sys

from jaxrl.errors import OutputError


def write(text: str) -> bool:
    """Write to standard output and flush; False if the reader has left. Raises `OutputError`."""
    if sys.stdout is None:
        raise OutputError("cannot write to standard output: it is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python writes what is left at exit: into nothing, else it complains once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            reason = error.strerror
            raise OutputError(f"cannot write to standard output: {reason}") from None
        return False
    return True


def report(text: str) -> None:
    """Write to standard error and flush. Where that fails nobody can be told, and what the command
    does goes on: a full disk for logs must not end a server."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed, None
        sys.stderr.write(text)
        sys.stderr.flush()

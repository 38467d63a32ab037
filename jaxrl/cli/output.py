"""Standard output of the commands: a reader that left early is no error, a full disk is one."""

from __future__ import annotations

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

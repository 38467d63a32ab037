"""The file of what a model answered: all of it or nothing, and never in place of another."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxrl.errors import OutputError


class PredictionsFile:
    """A JSON-lines file to be.

    Raises `OutputError` at once if it exists or its folder does not: before anything was computed.
    """

    def __init__(self, path: str):
        self._path = Path(path)
        if os.path.lexists(self._path):
            raise self._taken()
        if not os.access(self._path.parent, os.W_OK) or not self._path.parent.is_dir():
            raise OutputError(f"--predictions={path}: its folder must exist and be writable")

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Write the records, one a line. Raises `OutputError`; nothing is then left behind."""
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        try:
            with part.open("x", encoding="utf-8") as file:
                file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
                file.flush()
                os.fsync(file.fileno())
            # A link, unlike a rename, does not replace what came into being meanwhile.
            os.link(part, self._path)
        except FileExistsError:
            raise self._taken() from None
        except OSError as error:
            reason = error.strerror or error
            raise OutputError(f"cannot write --predictions={self._path}: {reason}") from None
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    def _taken(self) -> OutputError:
        return OutputError(f"--predictions={self._path} exists already; choose another file")

"""Loggers of the standard library whose records say which component and which process spoke.

Everything hangs below the logger "jaxrl". Nothing is attached at import, and the root logger of a
host application is never touched.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO

from jaxrl.errors import ConfigError, OutputError

ROOT = "jaxrl"
FORMAT = "%(asctime)s %(levelname).1s r%(rank)d %(component)s] %(message)s"
_rank = 0
_installed: list[logging.Handler] = []


class _Stamp(logging.Filter):
    """Adds `component` and `rank` to the records of one logger."""

    def __init__(self, component: str):
        super().__init__()
        self._component = component

    def filter(self, record: logging.LogRecord) -> bool:
        record.component = self._component
        record.rank = _rank
        return True


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at that moment: notebooks and progress lines replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def get_logger(component: str) -> logging.Logger:
    """The logger "jaxrl.<component>". Cheap, without handlers; the same object at each call."""
    logger = logging.getLogger(f"{ROOT}.{component}")
    if not any(isinstance(f, _Stamp) for f in logger.filters):
        logger.addFilter(_Stamp(component))
    return logger


def setup_logging(level: str = "INFO", rank: int = 0, file: Path | str | None = None) -> None:
    """Send the records of jaxrl to stderr, and to `file` too if given; a later call replaces both.

    `rank` is the index of this process. Raises `ConfigError` for an unknown level, `OutputError` if
    the file cannot be opened.
    """
    global _rank
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise ConfigError(f"log_level={level!r} must be one of {sorted(levels)}")
    handlers: list[logging.Handler] = [_StderrHandler()]
    if file is not None:
        try:
            handlers.append(logging.FileHandler(file, encoding="utf-8"))
        except OSError as error:
            raise OutputError(f"cannot write the log file {file}: {error.strerror}") from error
    reset_logging()
    _rank = rank
    logger = logging.getLogger(ROOT)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
    _installed.extend(handlers)
    logger.setLevel(levels[level.upper()])
    # A host application that prints what reaches its root would print each record twice.
    logger.propagate = False


def reset_logging() -> None:
    """Take away what `setup_logging` attached."""
    logger = logging.getLogger(ROOT)
    for handler in _installed:
        logger.removeHandler(handler)
        handler.close()
    _installed.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True

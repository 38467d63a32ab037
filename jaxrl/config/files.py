"""Config files: Python files with `get_config()`."""

from __future__ import annotations

import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl.config.experiment import ExperimentConfig
from jaxrl.config.serialize import load_config, read_text
from jaxrl.errors import ConfigError


def load_config_file(path: str | os.PathLike[str]) -> ExperimentConfig:
    """Path of a Python file with `get_config()`, or of a `config.json` -> its config.

    Raises `ConfigError` in one line: the file, the line if there is one, and what is wrong.
    """
    path = os.fspath(path)
    if path.endswith(".json"):
        return load_config(path)
    module = _run_file(path)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(f"{path}: must define get_config() -> ExperimentConfig")
    config = _located(path, get_config)
    if not isinstance(config, ExperimentConfig):
        kind = type(config).__name__
        raise ConfigError(f"{path}: get_config() must return an ExperimentConfig, not {kind}")
    return config


def _run_file(path: str) -> types.ModuleType:
    """Run the file as a module of its own, without the import system: that leaves .pyc files."""
    source = read_text(path)
    module = types.ModuleType(f"jaxrl_config_{Path(path).stem}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses of the file look their module up
    _located(path, lambda: exec(compile(source, path, "exec"), vars(module)))
    return module


def _located(path: str, call: Callable[[], Any]) -> Any:
    """Result of `call`; its exceptions become a `ConfigError` "file:line: what happened"."""
    try:
        return call()
    except SyntaxError as error:
        where, what = f"{error.filename or path}:{error.lineno}", f"SyntaxError: {error.msg}"
    except SystemExit as error:
        where, what = path, f"the file called sys.exit({error.code!r})"
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        where = f"{path}:{lines[-1]}" if lines else path
        # Our own messages say all; of other errors the type is half of the message.
        known = isinstance(error, ConfigError)
        what = str(error) if known else f"{type(error).__name__}: {error}".rstrip(": ")
    raise ConfigError(f"{where}: {what}")

"""What the TPU compiler needs of the process, to be said before jax is imported. Free of jax."""

from __future__ import annotations

import importlib.util
import os

from jaxrl.errors import ConfigError

INSTALL = "pip install 'jaxrl[tpu-compile]'"

ENVIRONMENT = {
    # A chip or GPU that is here is not touched: nothing is run.
    "JAX_PLATFORMS": "cpu",
    # The library asks the cloud what machine this is, and waits for an answer.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Without it a second process that compiles dies on a lock file.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Variables that the compiler needs on a machine without a TPU."""


def available() -> bool:
    """Whether there is a compiler: installed, or where TPU_LIBRARY_PATH says."""
    return bool(os.environ.get("TPU_LIBRARY_PATH") or importlib.util.find_spec("libtpu"))


def prepare() -> None:
    """Set the variables that are not set yet. Raises `ConfigError` if there is no compiler."""
    library = os.environ.get("TPU_LIBRARY_PATH", "")
    if library and not os.path.isfile(library):
        raise ConfigError(f"TPU_LIBRARY_PATH={library}: there is no such file")
    if not available():
        raise ConfigError(
            f"the TPU compiler is not installed: {INSTALL}, or set TPU_LIBRARY_PATH to a libtpu.so"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

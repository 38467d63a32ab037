"""Reward functions that behave as badly as those of real users; imported by reward processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np


class Unshowable(Exception):
    """Its message cannot be made."""

    def __str__(self):
        raise RuntimeError("no message")


def obey(completion, reference):
    """Do what the text of the completion says."""
    return ACTIONS[completion.text](reference)


def hang(_):
    """Sleep for ever, deaf to polite signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def hang_with_child(reference):
    """Start a process of one's own, then hang; the child's id goes into a file."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(reference["file"], "w") as file:
        file.write(str(child.pid))
    hang(reference)


def hang_in_c(reference):
    """Hang while holding the interpreter's lock, so that no thread of this process can run."""
    if "file" in reference:
        with open(reference["file"], "w") as file:
            file.write(str(os.getpid()))
    ctypes.PyDLL(None).sleep(600)


def fail(_):
    """Raise."""
    raise ValueError("no digit\nin it")


def fail_unshowably(_):
    """Raise something that cannot be shown."""
    raise Unshowable


def crash(_):
    """Read memory that is not there."""
    ctypes.string_at(0)


def flood(_):
    """Write a lot of text wherever text can go."""
    for _ in range(200):
        print("x" * 1000)  # noqa: T201
    os.write(1, b"\x00\x00\x00\x00\x00\x00\x00\x01garbage")
    sys.stdout.flush()
    return 0.5


def close_everything(_):
    """Close every file descriptor, the pool's socket among them."""
    os.closerange(0, 256)
    time.sleep(60)


def jax_is_loaded(_):
    """1 if this process has imported jax."""
    return float("jax" in sys.modules)


def recurse(reference):
    """Never come to an end, downwards."""
    return recurse(reference)


ACTIONS = {
    "one": lambda _: 1.0,
    "pid": lambda _: float(os.getpid()),
    "env": lambda _: float(os.environ["JAX_PLATFORMS"] == "cpu"),
    "main thread": lambda _: float(threading.current_thread() is threading.main_thread()),
    "float32": lambda _: np.float32(0.25),
    "int": lambda _: 3,
    "nan": lambda _: float("nan"),
    "inf": lambda _: float("-inf"),
    "none": lambda _: None,
    "str": lambda _: "1.0",
    "bool": lambda _: True,
    "numpy bool": lambda _: np.bool_(True),
    "array": lambda _: np.ones(3),
    "huge int": lambda _: 10**400,
    "hang": hang,
    "hang with child": hang_with_child,
    "hang in c": hang_in_c,
    "fail": fail,
    "fail unshowably": fail_unshowably,
    "exit": lambda _: sys.exit(4),
    "interrupt": lambda _: signal.raise_signal(signal.SIGINT),
    "os exit": lambda _: os._exit(3),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "crash": crash,
    "flood": flood,
    "close everything": close_everything,
    "recurse": recurse,
    "jax": jax_is_loaded,
    "sleep a little": lambda _: time.sleep(0.2) or 1.0,
    "answer length": lambda reference: float(len(reference["answer"])),
}

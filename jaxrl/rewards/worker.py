"""The reward process: runs one scorer, one item at a time. Imports neither jax nor the pool.

Messages in: first the pickled scorer, then one pickled (completion, reference) per item. Messages
out, in JSON: {"event": "ready"}, and per item {"event": "started"} and {"event": "done", …}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import math
import numbers
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from jaxrl.rewards.wire import receive_message, send_message

WATCH_INTERVAL_S = 0.5
"""How often a process looks whether the one that started it still lives."""

SELF_DESTRUCT_S = 10.0
"""How long after the time limit a process ends itself, if nobody killed it."""

LONGEST_DETAIL = 2000
"""Characters of a message about a failed item; values and messages may be of any size."""


def main(descriptor: int, parent: int, timeout_s: float) -> None:
    """Serve items from the socket `descriptor` until it closes or the process `parent` is gone."""
    channel = socket.socket(fileno=descriptor)
    # A reward may print: its output goes where errors go, and standard output stays the run's own.
    with contextlib.suppress(OSError, AttributeError):  # the run may have closed either of them
        os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    try:
        _serve(channel, timeout_s)
    finally:
        _end()


def judge(value: Any) -> dict[str, Any]:
    """What a returned value means: the fields `outcome`, `value`, `detail` of a result."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except Exception as error:
            return _failure(f"returned {_show(value)}, which is no float: {_describe(error)}")
        if math.isfinite(number):
            return {"outcome": "ok", "value": number, "detail": ""}
        return _failure(f"returned {number}; a reward must be finite")
    return _failure(
        f"returned {_show(value)} of type {type(value).__name__}; a reward must be a number, "
        "such as float(x)"
    )


def _serve(channel: socket.socket, timeout_s: float) -> None:
    scorer_bytes = receive_message(channel)
    if scorer_bytes is None:
        return
    try:
        scorer = pickle.loads(scorer_bytes)
        getattr(scorer, "prepare", lambda: None)()
        _limit_memory(getattr(scorer, "memory_bytes", 0))
    except BaseException as error:
        _reply(channel, event="failed", detail=_describe(error))
        return
    _reply(channel, event="ready")
    with open(os.devnull, "w") as nowhere:
        while (item := receive_message(channel)) is not None:
            try:
                completion, reference = pickle.loads(item)
            except BaseException as error:
                detail = f"the item could not be unpickled: {_describe(error)}"
                _reply(channel, event="done", **_failure(detail))
                continue
            _reply(channel, event="started")
            # A watchdog in C, for code that hangs while it holds the interpreter's lock.
            faulthandler.dump_traceback_later(timeout_s + SELF_DESTRUCT_S, exit=True, file=nowhere)
            result = _score(scorer, completion, reference)
            faulthandler.cancel_dump_traceback_later()
            _reply(channel, event="done", **result)


def _limit_memory(growth: int) -> None:
    """Let this process grow by so many bytes from now on (0: without limit), where the system can:
    beyond that an allocation is a MemoryError, and not the end of some other process."""
    if not growth:
        return
    # Completions need numpy, which takes memory for its threads when it is imported.
    importlib.import_module("jaxrl.types")
    try:
        import resource

        with open("/proc/self/statm") as file:
            present = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = present + growth
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _score(scorer: Any, completion: Any, reference: Any) -> dict[str, Any]:
    try:
        return judge(scorer(completion, reference))
    # SystemExit and KeyboardInterrupt too: whatever a reward raises is its failure, not ours.
    except BaseException as error:
        return _failure(_describe(error))


def _failure(detail: str) -> dict[str, Any]:
    return {"outcome": "error", "value": None, "detail": detail[:LONGEST_DETAIL]}


def _reply(channel: socket.socket, **message: Any) -> None:
    send_message(channel, json.dumps(message).encode())


def _describe(error: BaseException) -> str:
    """`ValueError: no digit (rewards.py:12 in score)`, for any exception whatever."""
    try:
        text = str(error)
    except BaseException:
        text = "<its message cannot be shown>"
    frames = traceback.extract_tb(error.__traceback__)
    # The first frames are this file's own.
    where = next((f for f in reversed(frames) if f.filename != __file__), None)
    place = f" ({os.path.basename(where.filename)}:{where.lineno} in {where.name})" if where else ""
    return f"{type(error).__name__}: {text[:LONGEST_DETAIL]}{place}"


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except BaseException:
        return "<a value that cannot be shown>"
    return text if len(text) <= 80 else text[:77] + "..."


def _watch(parent: int) -> None:
    """End this process soon after its parent, also while a reward runs."""
    while os.getppid() == parent:
        time.sleep(WATCH_INTERVAL_S)
    _end()


def _end() -> None:
    """Leave at once, with every process that a reward started in our group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)

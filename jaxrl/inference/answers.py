"""How requests learn of their ends."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError

from jaxrl.errors import DriverError
from jaxrl.types import Completion


def failure_of(cause: BaseException) -> DriverError:
    """What everybody is told when a call of the engine has failed."""
    error = DriverError(f"the decode engine failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def answer(future: Future, value: Completion | Exception | None) -> bool:
    """Answers a future, unless it was answered or cancelled in the meantime; whether it did."""
    give = future.set_exception if isinstance(value, Exception) else future.set_result
    try:
        give(value)
    except InvalidStateError:
        return False
    return True

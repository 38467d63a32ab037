"""Processes of one job: start-up, groups, checked collectives, the watchdog.

Importing this package loads nothing: each name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.distributed.groups import Group
    from jaxrl.distributed.hlo import Collective, collectives_in
    from jaxrl.distributed.processes import Processes
    from jaxrl.distributed.startup import current, join
    from jaxrl.distributed.watchdog import EXIT_WATCHDOG, Watch

_HOME = {
    "Group": "groups",
    "Collective": "hlo",
    "collectives_in": "hlo",
    "Processes": "processes",
    "current": "startup",
    "join": "startup",
    "EXIT_WATCHDOG": "watchdog",
    "Watch": "watchdog",
}

__all__ = [
    "EXIT_WATCHDOG",
    "Collective",
    "Group",
    "Processes",
    "Watch",
    "collectives_in",
    "current",
    "join",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # later look-ups do not come here again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

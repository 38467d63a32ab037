"""Words for what differs between processes, and for who is on which side."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

_VALUE = 160
"""Characters of a value that a message shows."""


def name_processes(processes: Iterable[int]) -> str:
    """[0] -> "process 0"; [0, 2, 3, 4] -> "processes 0, 2-4"."""
    ordered = sorted(set(processes))
    runs = []
    for _, run in itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        members = [member for _, member in run]
        if len(members) < 3:
            runs += [str(member) for member in members]
        else:
            runs.append(f"{members[0]}-{members[-1]}")
    return f"{'process' if len(ordered) == 1 else 'processes'} {', '.join(runs)}"


def sides_of(values: Mapping[int, Any]) -> str:
    """Process -> value: "0.1 in process 0; 0.2 in processes 1-3"; the larger side first."""
    sides: dict[str, list[int]] = {}
    for process, value in values.items():
        sides.setdefault(_shown(value), []).append(process)
    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), min(side[1])))
    return "; ".join(f"{value} in {name_processes(who)}" for value, who in ordered)


def differences(facts: Mapping[int, Mapping[str, str]], most: int = 5) -> list[str]:
    """Process -> (name -> value): one line for each name whose values are not all the same.

    After `most` lines the last says how many more there are.
    """
    names = dict.fromkeys(name for each in facts.values() for name in each)
    found = []
    for name in names:
        values = {process: each.get(name, "nothing") for process, each in facts.items()}
        if len(set(values.values())) > 1:
            found.append(f"{name}: {sides_of(values)}")
    return [*found[:most], f"and {len(found) - most} more"] if len(found) > most else found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings -> dotted name -> value as JSON."""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{dotted}.")
        else:
            flat[dotted] = json.dumps(value, default=str, sort_keys=True)
    return flat


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _VALUE else f"{text[:_VALUE]}... ({len(text)} characters)"

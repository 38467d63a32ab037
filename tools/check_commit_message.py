"""Refuse a commit whose subject is not a conventional commit in the imperative mood.

Used as a git hook: `python tools/check_commit_message.py .git/COMMIT_EDITMSG`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TYPES = ("feat", "fix", "docs", "test", "perf", "refactor", "build", "ci", "chore", "revert")
SUBJECT = re.compile(rf"^({'|'.join(TYPES)})(\([a-z0-9_/-]+\))?!?: (?P<summary>\S.*)$")
MAX_LENGTH = 100


def problem(message: str) -> str | None:
    """The rule that the first line of `message` breaks, or None."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(("Merge ", "fixup! ", "squash! ")):
        return None
    match = SUBJECT.match(subject)
    if match is None:
        return f"must read `type(scope): summary` with a type of {', '.join(TYPES)}"
    if len(subject) > MAX_LENGTH:
        return f"has {len(subject)} characters, at most {MAX_LENGTH} are allowed"
    summary = match["summary"]
    if summary.endswith("."):
        return "must not end with a full stop"
    first = summary.split()[0].lower()
    if first.endswith("ed") and first not in {"embed", "feed", "seed", "speed", "need", "shed"}:
        return f"must be imperative: {first!r} looks like the past tense"
    if len(lines) > 1 and lines[1].strip():
        return "must be followed by an empty line"
    return None


def main(argv: list[str]) -> int:
    """Check the message file named in `argv`; 0 when its subject follows the rules."""
    message = Path(argv[1]).read_text(encoding="utf-8")
    found = problem(message)
    if found is not None:
        print(f"commit subject {message.splitlines()[:1]} {found}", file=sys.stderr)
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv))

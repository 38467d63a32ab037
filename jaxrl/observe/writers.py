"""Where metrics go: JSON lines, the one record that everything else is drawn from; TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.errors import DataError, JaxrlError, OutputError


class JsonlWriter:
    """One JSON object per step: `{"step": 3, "time": 1.7e9, "reward/mean": 0.5}`.

    Every line reaches the file when it is written, so a killed process leaves a valid file, less at
    most the end of its last line, which is cut off when the file is opened again. JSON knows no
    numbers that are not finite: they are the strings "nan", "inf" and "-inf".
    """

    def __init__(self, path: Path | str):
        """Appends to `path`. Raises `OutputError` if it cannot be opened."""
        self._path = Path(path)
        try:
            _cut_torn_line(self._path)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise OutputError(f"cannot write metrics to {path}: {error.strerror}") from error

    def write(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        """See `Writer`."""
        record = {"step": step, "time": round(wall_time, 3)}
        record |= {name: v if math.isfinite(v) else str(v) for name, v in values.items()}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
        except OSError as error:
            raise OutputError(f"cannot write metrics to {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """See `Writer`."""
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    """Cut the file after its last newline."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a `JsonlWriter` file in the order of their steps, numbers as floats.

    After a resume steps occur twice: records of a step are joined and the later value counts. The
    unfinished last line of a file that is being written is left out. Raises `DataError` naming the
    line otherwise.
    """
    text = Path(path).read_text(encoding="utf-8")
    steps: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            record = json.loads(line)
            values = {name: float(v) for name, v in record.items()}
            steps.setdefault(int(record["step"]), {}).update(values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}:{number} is not a metrics record: {error}") from error
    return [{**steps[step], "step": step} for step in sorted(steps)]


class TensorBoardWriter:
    """Scalars as TensorBoard events in a directory, through tensorboardX."""

    def __init__(self, directory: Path | str, *, start_step: int = 0):
        """`start_step` hides events of an earlier process from that step on.

        Raises `JaxrlError` when tensorboardX is missing.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise JaxrlError(
                "TensorBoard metrics need the package tensorboardX: pip install tensorboardX, "
                "or set observe.tensorboard=False"
            ) from error
        self._writer = SummaryWriter(str(directory), purge_step=start_step or None)

    def write(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        """See `Writer`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=wall_time)

    def close(self) -> None:
        """See `Writer`."""
        self._writer.close()

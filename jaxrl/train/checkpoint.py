"""Full checkpoints: weights, optimizer state and step (Orbax), with JSON beside them.

`<path>/<step>/` appears by one rename when all of it is on disk. A process that is killed while it
saves leaves the checkpoints before as they were. Reading verifies the digest of everything that was
read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.errors import CheckpointError
from jaxrl.models.lora import join_frozen
from jaxrl.train.state import TrainState
from jaxrl.types import WeightVersion
from jaxrl.weights import disk
from jaxrl.weights.digest import compute_digest, verify
from jaxrl.weights.exchange import copy_to

_STATE, _RECORD = "state", "record"
_RECORD_FILE = f"{_RECORD}/metadata"
_FORMAT = 1


class CheckpointStore:
    """Checkpoints in the directory `path`, of which the last `keep` stay. One process writes.

    Nothing is created before the first `save`. Close it (or use it as a context manager), so that
    the last save is waited for.
    """

    def __init__(self, path: str | Path, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        self.path = Path(path).absolute()
        self.keep = keep
        self._checkpointer: Any = None
        self._saving: int | None = None
        disk.quiet_orbax()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def save(
        self, step: int, state: TrainState, meta: Mapping[str, Any], *, frozen: Any = None
    ) -> None:
        """Save `state` and `meta` as `step`; the disk is written in the background.

        The state is copied on its devices first, so the caller may go on and donate it. An earlier
        save is waited for. If `meta["version"]` is `{"number": …, "digest": …}`, the params must
        have that digest, together with the `frozen` weights, which are not written.

        Raises `WeightVersionError` if they have not, `ValueError` if `meta` is not JSON,
        `CheckpointError` if the step exists, and `OutputError` if this or the last save cannot be
        written.
        """
        meta = dict(meta)
        self.wait()
        if step in self.steps():
            raise CheckpointError(f"{self.path} already holds a checkpoint of step {step}")
        version = _version_of(meta)
        if version is not None:
            verify(join_frozen(state.params, frozen), version, source="params to be saved")
        record = _to_json(step, state, meta)
        disk.make_folder(self.path)
        self._write(step, copy_to(state), record)

    def wait(self) -> None:
        """Return when the last save is on disk; raises `OutputError` if it failed."""
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        with disk.output_errors(self.path / str(step)):
            self._checkpointer.wait_until_finished()
        for old in self.steps()[: -self.keep]:
            disk.remove_step(self.path, old)

    def close(self) -> None:
        """Wait for the last save and free the threads behind it."""
        try:
            self.wait()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
                self._checkpointer = None

    def steps(self) -> list[int]:
        """The complete checkpoints, ascending."""
        return disk.complete_steps(self.path, _RECORD_FILE)

    def latest(self) -> int | None:
        """Step of the last complete checkpoint, or None; one still being saved does not count."""
        steps = self.steps()
        return steps[-1] if steps else None

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """The `meta` that was saved with `step` (None: the latest). Raises `CheckpointError`."""
        return self._record(self._resolve(step))["meta"]

    def restore(
        self, state_like: TrainState, step: int | None = None, *, frozen: Any = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Read `step` (None: the latest) -> (state, meta), verified bit for bit.

        `state_like` holds arrays or `jax.ShapeDtypeStruct` whose shardings the result takes
        (`TrainEngine.abstract_state`); it may be another mesh than the one that saved. `frozen` as
        in `save`.

        Raises `CheckpointError` for a step that is missing (listing those that exist), damaged or
        does not fit `state_like` (naming tensors and both shapes), and `WeightVersionError` if the
        params are not those of `meta["version"]`.
        """
        step = self._resolve(step)
        record, folder = self._record(step), self.path / str(step)
        stored = disk.tensors_from_json(record["tensors"])
        disk.check_tensors(stored, disk.tensors_of(state_like), str(folder))
        state = self._read(folder, disk.with_shardings(state_like, None))
        version = _version_of(record["meta"])
        if version is not None:
            source = f"{folder} with the frozen weights" if frozen else str(folder)
            verify(join_frozen(state.params, frozen), version, source=source)
        digest = compute_digest(state)
        if digest != record["digest"]:
            raise CheckpointError(
                f"{folder} is damaged: the state was saved with digest {record['digest']}, "
                f"what was read has {digest}"
            )
        return state, record["meta"]

    def _write(self, step: int, state: TrainState, record: Mapping[str, Any]) -> None:
        import orbax.checkpoint as ocp

        # Of this process too: of a save that failed.
        disk.remove_leftovers(self.path)
        if self._checkpointer is None:
            self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        items = ocp.args.Composite(
            **{_STATE: ocp.args.StandardSave(state), _RECORD: ocp.args.JsonSave(record)}
        )
        with disk.output_errors(self.path / str(step)):
            self._checkpointer.save(self.path / str(step), args=items)
        self._saving = step

    def _read(self, folder: Path, target: TrainState) -> TrainState:
        import orbax.checkpoint as ocp

        items = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(target)})
        with disk.input_errors(folder):
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                return checkpointer.restore(folder, args=items)[_STATE]

    def _record(self, step: int) -> dict[str, Any]:
        """What was written beside the state, checked for its form."""
        path = self.path / str(step) / _RECORD_FILE
        record = disk.read_json(path)
        with disk.input_errors(path):
            if record["format"] != _FORMAT:
                raise CheckpointError(
                    f"{path} has format {record['format']}; this release reads {_FORMAT}"
                )
            if record["step"] != step:
                raise CheckpointError(f"{path} belongs to step {record['step']}, not to {step}")
            return {name: record[name] for name in ("digest", "tensors", "meta")}

    def _resolve(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self.path} holds no complete checkpoint")
        if step is None:
            return steps[-1]
        if step not in steps:
            found = ", ".join(map(str, steps))
            raise CheckpointError(
                f"{self.path} holds no complete checkpoint of step {step}; there are: {found}"
            )
        return step


def _to_json(step: int, state: TrainState, meta: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(meta, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta={meta!r} must be JSON: {error}") from error
    return {
        "format": _FORMAT,
        "step": step,
        "digest": compute_digest(state),
        "tensors": disk.tensors_to_json(disk.tensors_of(state)),
        "meta": meta,
    }


def _version_of(meta: Mapping[str, Any]) -> WeightVersion | None:
    """The weight version that `meta` names, if it does."""
    version = meta.get("version")
    return WeightVersion(**version) if isinstance(version, Mapping) else None

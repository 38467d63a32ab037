"""Full checkpoints of a run: what is saved, and how a run finds its place again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl.distributed import current
from jaxrl.errors import CheckpointError, NonFiniteError
from jaxrl.observe.logger import get_logger
from jaxrl.orchestration.session import Session
from jaxrl.train.engine import TrainEngine
from jaxrl.types import WeightVersion

_LOGGER = get_logger("orchestration")

Phase = Literal["sft", "rl"]
_SECTIONS = {"sft": "sft", "rl": "train"}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a checkpoint left the run.

    `position` is the data frontier of the phase: the state of the supervised pipeline, or which
    prompts RL has consumed. `rl_start` is the version that RL began with; -1 before RL.
    """

    phase: Phase
    version: WeightVersion
    position: Mapping[str, Any]
    rl_start: int = -1


def require_finite(metrics: Mapping[str, Any], update: int) -> None:
    """Raise `NonFiniteError` if the update's loss or gradient was not finite. Waits for it."""
    if float(metrics["nonfinite"]):
        raise NonFiniteError(
            f"update {update}: loss {float(metrics['loss'])} or gradient norm "
            f"{float(metrics['grad_norm'])} is not finite; the weights are those of before. A "
            "lower learning rate or grad_clip may help; going on starts at the last checkpoint"
        )


def save_checkpoint(session: Session, engine: TrainEngine, place: Place) -> None:
    """Save params, optimizer, step and `place` under the version's number; not twice the same.

    The copy to disk goes on in the background; an earlier one is waited for.
    """
    number = place.version.number
    if number in (session.saved_version, session.checkpoints.latest()):
        return
    meta = {
        "phase": place.phase,
        "version": dataclasses.asdict(place.version),
        "position": dict(place.position),
        "rl_start": place.rl_start,
        "seed": session.config.seed,
        "model": session.parts.model_meaning,
    }
    session.note_checkpoint(wait=True)
    current().verify(f"checkpoint {number}")
    session.checkpoints.save(number, engine.state, meta, frozen=engine.frozen)
    session.checkpoint_begun(number, place.phase)


def latest_place(session: Session) -> Place | None:
    """Where the last complete checkpoint left the run, or None when there is none.

    Raises `CheckpointError` if it is damaged.
    """
    number = session.checkpoints.latest()
    if number is None:
        return None
    meta = session.checkpoints.read_meta(number)
    return Place(
        phase=meta["phase"],
        version=WeightVersion(**meta["version"]),
        position=meta["position"],
        rl_start=meta["rl_start"],
    )


def restore_engine(session: Session, engine: TrainEngine, place: Place) -> None:
    """Put the checkpoint's state into the engine; verified against the version's digest.

    Raises `CheckpointError` if it is damaged, which names an earlier one where there is one.
    """
    number = place.version.number
    try:
        checkpoints = session.checkpoints
        state, _ = checkpoints.restore(engine.abstract_state, number, frozen=engine.frozen)
    except CheckpointError as error:
        if _keeps_moments_in_bfloat16(str(error)):
            advice = (
                "older releases kept the moments of bfloat16 weights in bfloat16: go on from such "
                f'a checkpoint with {_SECTIONS[place.phase]}.moment_dtype="bfloat16"'
            )
            raise CheckpointError(f"{error}\n{advice}") from error.__cause__
        earlier = [step for step in session.checkpoints.steps() if step < number]
        if not earlier:
            raise
        folder = session.checkpoints.path / str(number)
        advice = f"delete {folder} to go on from checkpoint {earlier[-1]}"
        raise CheckpointError(f"{error}; {advice}") from error.__cause__
    engine.restore(state, version=place.version.number)
    session.ledger.append("resumed", version=place.version.number, digest=place.version.digest)
    _LOGGER.info("resumed %s at %s", place.phase, place.version)


def _keeps_moments_in_bfloat16(reason: str) -> bool:
    """Whether a checkpoint does not fit because its optimizer state is in bfloat16."""
    return re.search(r"'opt_state/\S+' is stored as bfloat16.*has float32", reason) is not None

"""Supervised training: a run of its own, or the cold start before RL."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax

from jaxrl.config import ExperimentConfig
from jaxrl.data.supervised import SupervisedBatches, careless
from jaxrl.errors import NonFiniteError
from jaxrl.observe import names
from jaxrl.orchestration import hosts
from jaxrl.orchestration.recovery import (
    Place,
    latest_place,
    require_finite,
    restore_engine,
    save_checkpoint,
)
from jaxrl.orchestration.session import Session
from jaxrl.rollout.collate import rows_for
from jaxrl.train.engine import TrainEngine
from jaxrl.train.objectives import sft_objective
from jaxrl.train.optimizer import make_optimizer
from jaxrl.types import WeightVersion
from jaxrl.weights.digest import stamp


class SFTTrainer:
    """Trains on the answers of the training examples, `config.sft.steps` updates in all.

    >>> with SFTTrainer(config) as trainer:  # doctest: +SKIP
    ...     trainer.fit()
    """

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        devices: Sequence[jax.Device] | None = None,
        session: Session | None = None,
    ):
        """`devices` span the mesh (None: all); `session`: the run that this is the cold start
        of."""
        self.config = config
        self.session = session or Session(config, devices)
        parts, sft = self.session.parts, config.sft
        parts.check()
        rows = rows_for(
            sft.batch_size,
            config.longest_sequence,
            config.row_length,
            micro_batches=sft.micro_batches,
            data_axes=parts.row_shards,
        )
        self._previous: dict[str, jax.Array] | None = None
        demonstrations = careless(
            parts.train_examples,
            fraction=sft.careless,
            above=sft.careless_above,
            seed=config.seed,
        )
        self.batches = SupervisedBatches(
            demonstrations,
            parts.tokenizer,
            batch_size=sft.batch_size,
            rows=rows,
            row_length=config.row_length,
            seed=config.seed,
            chat=parts.chat,
        )
        self.engine = TrainEngine(
            parts.model,
            parts.initial_params(),
            make_optimizer(sft),
            sft_objective(logprob_chunk=config.train.logprob_chunk),
            mesh=parts.mesh,
            micro_batches=sft.micro_batches,
            name="supervised step",
        )

    def __enter__(self) -> SFTTrainer:
        self.session.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.close()

    def fit(self) -> WeightVersion:
        """Train up to `sft.steps`, from the last checkpoint if there is one. Returns the version.

        Ctrl-C saves a checkpoint after the current update and raises `Interrupted`.
        """
        session = self.session.open()
        place = latest_place(session)
        if place is not None and place.phase == "sft":
            restore_engine(session, self.engine, place)
            self.batches.restore(place.position)
        else:
            session.ledger.append("started", version=0)
        with session.working():
            try:
                while self.engine.version < self.config.sft.steps:
                    with session.step():
                        self._update()
                if self._previous is not None:
                    require_finite(self._previous, self.engine.version - 1)
            except NonFiniteError:
                # What is on disk is good, what is in memory is not known to be.
                raise
            except BaseException as error:
                # A checkpoint is written by all processes together, or not at all.
                if hosts.Agreed.on(error):
                    self._save()
                raise
            version = self._save()
        session.tracker.flush()
        return version

    def _update(self) -> None:
        began, step = time.monotonic(), self.engine.version
        self.session.stop_if_asked()
        batch = next(self.batches)
        metrics = self.engine.update(batch)
        # Of the update before: the device has finished that one, so nobody waits.
        previous, self._previous = self._previous, metrics
        if previous is not None:
            require_finite(previous, step - 1)
        self.session.ledger.append("updated", update=step, version=step + 1, phase="sft")
        self.session.note_checkpoint()
        every = self.config.checkpoint.every
        self.session.tracker.log(
            step + 1, {f"sft/{name}": value for name, value in metrics.items()}
        )
        # The device runs behind the host here: the speed evens out over a few steps.
        seconds = max(time.monotonic() - began, 1e-9)
        tokens = float((batch.segment_ids > 0).sum())
        self.session.tracker.log(step + 1, {names.TRAIN_SPEED: tokens / seconds})
        if every and (step + 1) % every == 0:
            self._save()

    def _save(self) -> WeightVersion:
        version = stamp(self.engine.params, self.engine.version)
        save_checkpoint(self.session, self.engine, Place("sft", version, self.batches.state()))
        return version

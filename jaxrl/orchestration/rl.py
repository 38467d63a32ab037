"""The RL trainer: cold start, asynchronous GRPO, pinned evaluation, recovery."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.config import ExperimentConfig
from jaxrl.distributed import current
from jaxrl.errors import ConfigError, DeadlineError, JaxrlError
from jaxrl.observe import names
from jaxrl.observe.logger import get_logger
from jaxrl.observe.plots import plot_metrics
from jaxrl.orchestration import hosts
from jaxrl.orchestration.evaluate import Evaluation, evaluate
from jaxrl.orchestration.exchange import exchange_groups
from jaxrl.orchestration.ledger import effective, read_ledger
from jaxrl.orchestration.recovery import (
    Place,
    latest_place,
    require_finite,
    restore_engine,
    save_checkpoint,
)
from jaxrl.orchestration.samplers import TextSampler, eval_params, make_pool
from jaxrl.orchestration.sampling import Sampling, make_sampling
from jaxrl.orchestration.session import Session
from jaxrl.orchestration.sft import SFTTrainer
from jaxrl.rewards.pool import RewardPool
from jaxrl.rollout.collate import collate, rows_for
from jaxrl.rollout.collector import Collector
from jaxrl.rollout.frontier import merged
from jaxrl.rollout.single_turn import SingleTurn
from jaxrl.rollout.staleness import StalenessController, require_fresh
from jaxrl.rollout.workflow import Workflow
from jaxrl.train.engine import TrainEngine
from jaxrl.train.objectives import grpo_objective
from jaxrl.train.optimizer import make_optimizer
from jaxrl.train.reference import Reference
from jaxrl.types import TrajectoryBatch, TrajectoryGroup, WeightVersion
from jaxrl.weights.digest import stamp

_LOGGER = get_logger("orchestration")


class RLTrainer:
    """Trains by reinforcement learning while it samples.

    >>> with RLTrainer(config) as trainer:  # doctest: +SKIP
    ...     trainer.fit()
    ...     trainer.sampler.generate("stone").text

    `workflow` replaces the single-turn episode with one of your own; `devices` span the mesh (None:
    all). Sampler and files stay open after `fit`, for `evaluate` and `sampler`, until `close` or
    the end of the `with`.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        workflow: Workflow | None = None,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.config = config
        self.session = Session(config, devices)
        self.parts = self.session.parts
        self.evaluations: dict[str, Evaluation] = {}
        self._workflow = workflow
        self._sampling: Sampling | None = None
        self._pool: RewardPool | None = None
        self._version: WeightVersion | None = None
        self._digests: dict[int, str] = {}
        self._tokens_seen = 0

    def __enter__(self) -> RLTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def fit(self) -> dict[str, Evaluation]:
        """Run to the end of `train.steps`, from the last checkpoint if there is one.

        Returns the evaluations "before" and "after" RL. Ctrl-C or SIGTERM ends the current update,
        saves a checkpoint and raises `Interrupted`; running again goes on from there.
        """
        with self.session.open().working():
            self._start()
            if 0 < self.config.train.steps <= self.updates:
                _LOGGER.warning(
                    "the run in %s is finished, nothing is trained: choose another output_dir, "
                    "or more than train.steps=%d",
                    self.session.run_dir.path,
                    self.config.train.steps,
                )
            with self._make_collector() as collector:
                try:
                    while self.updates < self.config.train.steps:
                        groups = self._next_batch(collector)
                        with self.session.step():
                            self._update(groups, collector)
                except BaseException as error:
                    # A checkpoint is written by all processes together, or not at all.
                    if hosts.Agreed.on(error):
                        self._save_after_failure()
                    raise
            self._finish()
        return self.evaluations

    def evaluate(self) -> Evaluation:
        """Evaluate the present weights on the held-out prompts."""
        self._require_weights("evaluate()")
        return self._evaluate("asked")

    @property
    def sampler(self) -> TextSampler:
        """Generates text under the weights that were published last."""
        self._require_weights("sampler")
        return TextSampler(self._sampling.pinned(self._version), self.parts)

    @property
    def _longest(self) -> int:
        """Most tokens of a sequence: episodes of several turns may use all that the model takes."""
        if self._workflow is None:
            return self.config.longest_sequence
        return min(self.config.model.max_length, self.config.row_length)

    @property
    def version(self) -> WeightVersion:
        """The weights that were published last."""
        self._require_weights("version")
        return self._version

    @property
    def updates(self) -> int:
        """RL updates done so far."""
        return self._version.number - self._place.rl_start

    def close(self) -> None:
        """Stop the sampler and the reward processes, and close the run's files."""
        if self._sampling is not None:
            self._sampling.stop()
            self._sampling = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self.session.close()

    # How a run begins.

    def _start(self) -> None:
        """Engine and sampler at the place where the run is."""
        place = latest_place(self.session)
        # Versions that a killed run published after its last checkpoint belong to no history now.
        self.session.store.discard_after(-1 if place is None else place.version.number)
        longest = 0 if self._workflow is None else self._longest
        # Before anything that takes long: samplers may be missing.
        self._sampling = make_sampling(self.session, longest)
        if place is None or place.phase == "sft":
            params, start = self._cold_start(place)
            place, resuming = Place("rl", start, {}, start.number), False
        else:
            params, resuming = self.parts.placeholder_params(), True
        self._engine = self._make_engine(params, place.rl_start)
        del params  # the engine has its copy
        if resuming:
            restore_engine(self.session, self._engine, place)
        self._place = place
        self._publish()
        self._pool = make_pool(self.config)
        if not resuming:
            self._store_version()
        self._reference = self._load_reference()
        self.evaluations["before"] = self._recall("before") or self._evaluate("before")
        self._logged_at = time.monotonic()

    def _cold_start(self, place: Place | None) -> tuple[Any, WeightVersion]:
        """The weights that RL begins with."""
        if place is None and not self.config.sft.steps:
            # A supervised trainer would make an optimizer's state and save it, for nothing.
            self.parts.train_prompts, self.parts.eval_prompts  # noqa: B018  # wrong data ends here
            self.session.ledger.append("started", version=0)
            params = self.parts.initial_params()
            return params, stamp(params, 0)
        trainer = SFTTrainer(self.config, session=self.session)
        version = trainer.fit()
        return trainer.engine.params, version

    def _make_engine(self, params: Any, version: int) -> TrainEngine:
        train = self.config.train
        objective = grpo_objective(
            self.config.algorithm,
            temperature=self.config.rollout.temperature,
            logprob_chunk=train.logprob_chunk,
        )
        return TrainEngine(
            self.parts.model,
            params,
            make_optimizer(train),
            objective,
            mesh=self.parts.mesh,
            micro_batches=train.micro_batches,
            version=version,
        )

    def _load_reference(self) -> Reference | None:
        """The weights that RL began with, if the objective holds the policy near them."""
        if not self.config.algorithm.kl_coef:
            return None
        offload = self.config.algorithm.ref_offload
        if self.updates == 0:
            return Reference(self._engine.params, offload=offload)
        shardings = self.parts.model.shardings(self.parts.mesh)
        start, abstract = self._place.rl_start, self.parts.model.abstract
        frozen = self._engine.frozen
        stored = self.session.store.restore(start, abstract, shardings, frozen=frozen)[0]
        return Reference(stored, offload=offload)

    def _make_collector(self) -> Collector:
        rollout = self.config.rollout
        processes = hosts.count()
        controller = StalenessController(
            rollout.max_staleness,
            self.config.train.batch_size // processes,
            self._version.number,
            max_concurrent=-(-rollout.max_concurrent // processes),
        )
        workflow = self._workflow or SingleTurn(
            self._pool,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            stop_tokens=self.parts.stop_ids,
            on_error=self.config.rewards.on_error,
        )
        return Collector(
            self._sampling.sampler,
            workflow,
            self.parts.train_prompts,
            controller=controller,
            group_size=rollout.group_size,
            run_seed=self.config.seed,
            frontier=self._place.position or None,
            share=(hosts.index(), processes),
            ledger=self.session.ledger.append,
            episode_timeout_s=rollout.episode_timeout_s,
            max_retries=rollout.max_retries,
        )

    # One update.

    def _next_batch(self, collector: Collector) -> list[TrajectoryGroup]:
        """The groups of the next update, from all processes, in the order of their prompts."""
        whole = self.config.train.batch_size // self.config.rollout.group_size

        def collect() -> list[TrajectoryGroup]:
            own, wait_s = whole // hosts.count(), self.config.rollout.wait_timeout_s
            try:
                return collector.next_batch(self._version.number, own, wait_s)
            except DeadlineError as error:
                raise DeadlineError(f"{error}{self._sampling.describe()}") from error

        return exchange_groups(collect, self._version.number, self._digests, self.session)

    def _update(self, groups: list[TrajectoryGroup], collector: Collector) -> None:
        """Train on the groups, publish the new weights, let the collector go on."""
        began, trained = time.monotonic(), self._version.number
        batch = self._collate(groups)
        require_fresh(batch.versions, batch.loss_mask, trained, self.config.rollout.max_staleness)
        metrics = self._engine.update(batch, self._extras(batch))
        # The device works meanwhile.
        self.session.ledger.consumed(groups, trained)
        if hosts.index() == 0:
            self.session.run_dir.write_trajectories(trained, groups, self._digests)
        require_finite(metrics, trained)
        self._publish()
        self.session.ledger.append(
            "updated", update=trained, version=self._version.number, phase="rl"
        )
        # Before anything slow: the sampler waits for this, nobody waits for the rest.
        collector.set_version(self._version.number)
        frontiers, tokens = zip(
            *hosts.exchange(
                "what was sampled", lambda: (collector.frontier(), self._sampling.tokens())
            ),
            strict=True,
        )
        self._place = Place("rl", self._version, merged(frontiers), self._place.rl_start)
        self._log(groups, metrics, collector, sum(tokens), time.monotonic() - began)
        self._periodic()

    def _collate(self, groups: list[TrajectoryGroup]) -> TrajectoryBatch:
        config, train = self.config, self.config.train
        rows = rows_for(
            train.batch_size,
            self._longest,
            config.row_length,
            micro_batches=train.micro_batches,
            data_axes=self.parts.row_shards,
        )
        return collate(
            groups,
            rows=rows,
            row_length=config.row_length,
            normalisation=config.algorithm.normalisation,
            normalize_std=config.algorithm.normalize_std,
        )

    def _extras(self, batch: TrajectoryBatch) -> dict[str, jax.Array]:
        if self._reference is None:
            return {}
        return {"ref_logp": self._engine.logprobs(batch, self._reference.params())}

    def _publish(self) -> None:
        """Hand the engine's weights to the sampler as the version that they are."""
        self._version = self._sampling.publish(self._engine.params, self._engine.version)
        # Versions older than the staleness bound can be in no later batch.
        oldest = self._version.number - self.config.rollout.max_staleness
        self._digests = {n: digest for n, digest in self._digests.items() if n >= oldest}
        self._digests[self._version.number] = self._version.digest

    def _periodic(self) -> None:
        """Evaluation, checkpoint and version on disk where they are due."""
        done, checkpoint = self.updates, self.config.checkpoint
        self.session.note_checkpoint()
        self._sampling.tidy(self._keeps)
        if done == self.config.train.steps:
            return
        if self.config.eval.every and done % self.config.eval.every == 0:
            self._evaluate("during")
        if self._keeps(self._version.number):
            self._store_version()
        if checkpoint.every and done % checkpoint.every == 0:
            save_checkpoint(self.session, self._engine, self._place)

    def _keeps(self, number: int) -> bool:
        """Whether the version stays in the store whatever comes after it."""
        done, every = number - self._place.rl_start, self.config.checkpoint.publish_every
        return done <= 0 or (every > 0 and done % every == 0)

    def _log(
        self,
        groups: list[TrajectoryGroup],
        metrics: Mapping[str, jax.Array],
        collector: Collector,
        generated: int,
        seconds: float,
    ) -> None:
        trajectories = [t for group in groups for t in group.trajectories]
        rewards = np.array([t.reward for t in trajectories])
        now = time.monotonic()
        elapsed, self._logged_at = now - self._logged_at, now
        fresh, self._tokens_seen = generated - self._tokens_seen, generated
        self.session.tracker.log(
            self._version.number,
            {f"train/{name}": value for name, value in metrics.items()}
            | collector.metrics()
            | {
                names.REWARD: float(rewards.mean()),
                "reward/solved": float((rewards >= 1.0).mean()),
                names.LENGTH: float(np.mean([t.sampled_tokens for t in trajectories])),
                names.ROLLOUT_SPEED: fresh / max(elapsed, 1e-9),
                names.TRAIN_SPEED: sum(len(t.tokens) for t in trajectories) / max(seconds, 1e-9),
            },
        )

    # Evaluation, checkpoints, the end.

    def _evaluate(self, when: str) -> Evaluation:
        """Evaluate the published version; nothing is published meanwhile."""
        rollout = self.config.rollout
        result = evaluate(
            self._sampling.pinned(self._version),
            self._pool,
            self.parts.eval_prompts[: self.config.eval.size],
            eval_params(self.parts),
            version=self._version,
            seed=self.config.seed,
            timeout_s=rollout.wait_timeout_s,
        )
        number, digest = self._version.number, self._version.digest
        fields = {"when": when, "prompts": result.prompts, **result.metrics()}
        self.session.ledger.append("evaluated", version=number, digest=digest, **fields)
        self.session.tracker.log(number, result.metrics())
        _LOGGER.info(
            "accuracy %.3f on %d held-out prompts, %s", result.accuracy, result.prompts, when
        )
        return result

    def _recall(self, when: str) -> Evaluation | None:
        """An evaluation that this run made before it was interrupted."""
        records = hosts.from_first(
            "reading the ledger", lambda: effective(read_ledger(self.session.run_dir.ledger))
        )
        for record in records:
            if record["event"] == "evaluated" and record.get("when") == when:
                return Evaluation.from_record(record)
        return None

    def _store_version(self) -> None:
        if self._sampling.stores:
            return
        current().verify(f"version {self._version.number}")
        self.session.store.publish(self._engine.params, self._version)
        self.session.ledger.published(self._version, where="store")

    def _save_after_failure(self) -> None:
        """Keep what was done before an interrupt or an error, unless that cut an update."""
        if self._engine.version != self._place.version.number:
            return
        try:
            save_checkpoint(self.session, self._engine, self._place)
            self.session.note_checkpoint(wait=True)
            # So that `eval` and `generate` show what was reached.
            self._store_version()
        except JaxrlError as error:
            _LOGGER.error("no checkpoint of version %d: %s", self._place.version.number, error)

    def _finish(self) -> None:
        # Without RL "before" was after the cold start already.
        steps, before = self.config.train.steps, self.evaluations["before"]
        self.evaluations["after"] = self._evaluate("after") if steps else before
        self._store_version()
        save_checkpoint(self.session, self._engine, self._place)
        self.session.note_checkpoint(wait=True)
        self.session.ledger.append("finished", version=self._version.number)
        self.session.tracker.flush()
        if self.config.observe.plots and hosts.index() == 0:
            try:
                plot_metrics(self.session.metrics_path, self.session.run_dir.plots / "metrics.png")
            except JaxrlError as error:
                _LOGGER.warning("no plots: %s", error)

    def _require_weights(self, what: str) -> None:
        if self._sampling is None or self._version is None:
            raise ConfigError(f"{what} needs weights: call fit() first")

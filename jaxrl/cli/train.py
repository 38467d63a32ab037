"""`jaxrl train`: cold start, RL and evaluation as a config says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl import distributed
from jaxrl.cli import output
from jaxrl.config import ExperimentConfig
from jaxrl.config.serialize import to_dict
from jaxrl.observe.progress import format_summary
from jaxrl.orchestration.evaluate import Evaluation
from jaxrl.orchestration.interrupts import Interrupted
from jaxrl.orchestration.rl import RLTrainer


def run(config: ExperimentConfig, args: Any) -> int:
    """Train, then show before and after and where the files are; returns the exit code."""
    options = args.options
    with distributed.join(
        options.coordinator or None,
        options.processes or None,
        options.process if options.process >= 0 else None,
        timeout_s=options.join_timeout_s,
        fingerprint={"config": to_dict(config)},
        watch=distributed.Watch(
            report_after_s=options.hang_report_s, exit_after_s=options.hang_exit_s
        ),
        # Who has compiled a program waits for the others, whose caches may be empty.
        agree_timeout_s=options.hang_exit_s,
    ) as processes:
        with RLTrainer(config) as trainer:
            try:
                evaluations = trainer.fit()
            except Interrupted:
                if processes.first:
                    output.report(f"the same command goes on from {trainer.session.run_dir.path}\n")
                raise
            if processes.first:
                _show(config, trainer, evaluations)
    return 0


def _show(
    config: ExperimentConfig, trainer: RLTrainer, evaluations: Mapping[str, Evaluation]
) -> None:
    version, folder = trainer.version, trainer.session.run_dir
    before, after = evaluations["before"], evaluations["after"]
    examples = [f"  {text!r} -> {answer!r}" for text, answer, _ in after.examples[:3]]
    lines = [
        "",
        # Without RL both are the evaluation after the supervised updates.
        format_summary(
            before.metrics() if config.train.steps else None,
            after.metrics(),
            title=f"{after.prompts} held-out prompts",
        ),
        "",
        "for example:",
        *examples,
        "",
        f"weights   {folder.weights}/{version.number}  ({version})",
        f"ledger    {folder.ledger}",
        f"metrics   {trainer.session.metrics_path}",
        f"plots     {folder.plots}",
        f'try       jaxrl generate "..." --run={folder.path}',
    ]
    output.write("\n".join(lines) + "\n")

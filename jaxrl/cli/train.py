"""`jaxrl train`: cold start, RL and evaluation as a config says."""

from __future__ import annotations

from typing import Any

from jaxrl.cli import output
from jaxrl.config import ExperimentConfig
from jaxrl.observe.progress import format_summary
from jaxrl.orchestration.interrupts import Interrupted
from jaxrl.orchestration.rl import RLTrainer


def run(config: ExperimentConfig, args: Any) -> int:
    """Train, then show before and after and where the files are; returns the exit code."""
    with RLTrainer(config) as trainer:
        try:
            evaluations = trainer.fit()
        except Interrupted:
            output.report(f"the same command goes on from {trainer.session.run_dir.path}\n")
            raise
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
    return 0

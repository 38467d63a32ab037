"""Generated tokens per CPU-second of a whole GRPO iteration: sampling, rewards, update.

`python benchmarks/iteration.py [--repeats N] [--max-staleness 0|1]`: 4 prompts of 32 tokens, 8
samples of 128 tokens each, one update of 32 sequences, through the trainer with everything a run
writes: ledger, trajectories, metrics. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import string
import tempfile
from pathlib import Path

import jax
import numpy as np
from shapes import GROUP_SIZE, GROUPS, LENGTH, NEW_TOKENS, PROMPT, SHAPE, emit, now, summary

from jaxrl import RLTrainer
from jaxrl.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    ObserveConfig,
    RolloutConfig,
    SFTConfig,
    TrainConfig,
)
from jaxrl.rollout.workflow import TrajectoryBuilder
from jaxrl.types import Prompt, Sampler, SamplingParams, Trajectory

WARM_UP = 3


class FullLength:
    """Samples 128 tokens whatever they are; the reward is a hash of them."""

    async def run(self, sampler: Sampler, prompt: Prompt) -> Trajectory:
        """One episode."""
        completion = await sampler.sample(prompt.tokens, SamplingParams(NEW_TOKENS, 1.0))
        builder = TrajectoryBuilder(prompt)
        builder.add_completion(completion)
        return builder.build(float(completion.tokens.sum() % 7))


class Timed(RLTrainer):
    """Notes the time whenever an update has begun."""

    def __init__(self, config: ExperimentConfig):
        super().__init__(config, workflow=FullLength(), devices=jax.devices()[:1])
        self.marks = []

    def _update(self, *args: object) -> None:
        self.marks.append(now())
        super()._update(*args)


def make_config(folder: Path, updates: int, args: argparse.Namespace) -> ExperimentConfig:
    """Random prompts of 32 letters for the benchmark's shape."""
    rng = np.random.default_rng(0)
    letters = list(string.ascii_lowercase)
    questions = folder / "questions.jsonl"
    rows = [{"question": "".join(rng.choice(letters, PROMPT)), "answer": "-"} for _ in range(256)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    batch = GROUPS * GROUP_SIZE
    return ExperimentConfig(
        output_dir=str(folder / "run"),
        model=ModelConfig(**SHAPE),
        data=DataConfig(
            source="jsonl",
            path=str(questions),
            tokenizer="bytes",
            train_size=200,
            eval_size=1,
            max_prompt_tokens=PROMPT,
        ),
        sft=SFTConfig(steps=0),
        train=TrainConfig(
            steps=updates,
            batch_size=batch,
            micro_batches=args.micro_batches,
            row_length=LENGTH,
        ),
        rollout=RolloutConfig(
            max_staleness=args.max_staleness,
            group_size=GROUP_SIZE,
            max_new_tokens=NEW_TOKENS,
            slots=batch,
            steps_per_dispatch=16,
        ),
        eval=EvalConfig(size=1),
        checkpoint=CheckpointConfig(every=0),
        observe=ObserveConfig(progress=False, tensorboard=False, plots=False),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--max-staleness", type=int, default=1)
    args = parser.parse_args()
    updates = WARM_UP + args.repeats + 1
    with tempfile.TemporaryDirectory() as folder:
        with Timed(make_config(Path(folder), updates, args)) as trainer:
            trainer.fit()
    # The last update has nothing to sample beside it.
    marks = trainer.marks[WARM_UP:-1] if args.max_staleness else trainer.marks[WARM_UP:]
    tokens = [GROUPS * GROUP_SIZE * NEW_TOKENS] * (len(marks) - 1)
    result = {"iteration": summary(tokens, marks)}
    emit({"benchmark": "iteration", "jax": jax.__version__, "args": vars(args), **result})


if __name__ == "__main__":
    main()

"""`jaxrl eval`: accuracy of published weights, or of a version of a run, on questions."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxrl.cli import output
from jaxrl.cli.predictions import PredictionsFile
from jaxrl.cli.published import open_parts, serve
from jaxrl.data.examples import load_examples
from jaxrl.data.jsonl import read_jsonl
from jaxrl.data.prompts import eval_prompts
from jaxrl.errors import DataError
from jaxrl.observe import names
from jaxrl.observe.progress import Progress
from jaxrl.orchestration.evaluate import Evaluation, evaluate
from jaxrl.orchestration.samplers import eval_params, make_pool
from jaxrl.orchestration.session import Parts
from jaxrl.types import Completion, Prompt


def run(args: Any) -> int:
    """Print the evaluation as one JSON object; returns the exit code."""
    predictions = PredictionsFile(args.options.predictions) if args.options.predictions else None
    parts = open_parts(args)
    prompts = _prompts(args, parts)
    params = eval_params(parts)
    tally = _Tally(len(prompts), shown=args.config.observe.progress and sys.stderr.isatty())
    tokens = [prompt.tokens for prompt in prompts]
    # Processes for the scores first: what is wrong with the scorer shows before weights are read.
    with make_pool(args.config) as pool:
        with serve(args, parts, tokens, new_tokens=params.max_tokens) as driver, tally:
            result = evaluate(
                driver,
                pool,
                prompts,
                params,
                version=driver.version,
                seed=args.config.seed,
                timeout_s=None,
                watch=tally.add,
            )
    if predictions is not None:
        predictions.write(tally.record(prompt) for prompt in prompts)
    summary = _summary(result, tally, args.config.rewards.scorer)
    output.write(json.dumps(summary, indent=2) + "\n")
    return 0


def _prompts(args: Any, parts: Parts) -> list[Prompt]:
    """The questions of --data, or those that the run holds out, as prompts; the first `size`."""
    options, data = args.options, args.config.data
    template = "{question}" if options.raw else data.prompt_template
    if options.data:
        examples = read_jsonl(options.data, template=template, answer_format=options.answer_format)
        # The limit of training's prompts is none for these.
        longest = parts.model.config.max_length - args.config.eval_new_tokens
        wanted = options.size or len(examples)
    else:
        examples = load_examples(dataclasses.replace(data, prompt_template=template), "eval")
        longest, wanted = data.max_prompt_tokens, options.size or args.config.eval.size
    if wanted > len(examples):
        raise DataError(f"--size={wanted} must be at most {len(examples)}, the number of questions")
    chat = None if options.raw else parts.chat
    return eval_prompts(examples[:wanted], parts.tokenizer, max_prompt_tokens=longest, chat=chat)


class _Tally:
    """What has been scored so far; shows it on a terminal."""

    def __init__(self, total: int, *, shown: bool):
        self._total, self._shown = total, shown
        self._progress: Progress | None = None
        self._done: dict[str, tuple[Completion, float | None]] = {}
        self.tokens = self.correct = self.truncated = 0

    def __enter__(self) -> _Tally:
        self._began = time.monotonic()
        self._progress = Progress(self._total, unit="prompt") if self._shown else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.close()

    def add(self, prompt: Prompt, completion: Completion, score: float | None) -> None:
        """One more prompt has its score (None: time-out)."""
        self._done[prompt.id] = completion, score
        self.tokens += len(completion.tokens)
        self.truncated += completion.finish_reason == "length"
        self.correct += _is_correct(score)
        if self._progress is not None:
            seconds = time.monotonic() - self._began
            shown = {
                names.ACCURACY: self.correct / len(self._done),
                names.ROLLOUT_SPEED: self.tokens / seconds,
            }
            self._progress.write(len(self._done), shown, time.time())

    def record(self, prompt: Prompt) -> dict[str, Any]:
        """The line of a prompt in the predictions."""
        completion, score = self._done[prompt.id]
        return {
            "prompt": prompt.text,
            "answer": prompt.reference["answer"],
            "completion": completion.text,
            "score": score,
            "outcome": "timeout" if score is None else "ok",
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.tokens),
        }


def _is_correct(score: float | None) -> bool:
    return score is not None and score >= 1.0


def _summary(result: Evaluation, tally: _Tally, scorer: str) -> dict[str, Any]:
    return {
        "version": result.version.number,
        "digest": result.version.digest,
        "scorer": scorer,
        "prompts": result.prompts,
        "correct": tally.correct,
        "truncated": tally.truncated,
        **result.metrics(),
        "seconds": round(result.seconds, 3),
        "tokens_per_second": round(tally.tokens / result.seconds, 1),
        "examples": _finite(result.examples),
    }


def _finite(examples: Sequence[tuple[str, str, float]]) -> list[list[Any]]:
    """JSON has no NaN: an example whose score ran out of time has null."""
    return [[text, answer, None if score != score else score] for text, answer, score in examples]

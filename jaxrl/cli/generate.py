"""`jaxrl generate`: complete a prompt with published weights, or with a version of a run."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from jaxrl.cli import output
from jaxrl.cli.published import open_parts, serve
from jaxrl.orchestration.samplers import TextPieces, text_request


def run(args: Any) -> int:
    """Print `n` completions while they are decoded; what it took goes to stderr.

    Returns the exit code.
    """
    options = args.options
    parts = open_parts(args)
    tokens, params = text_request(
        parts,
        options.prompt,
        max_new_tokens=options.max_new_tokens or 0,
        temperature=options.temperature,
        seed=options.seed,
        raw=options.raw,
    )
    if options.max_new_tokens is None:
        # Nobody asked for a length: as many as fit.
        fitting = parts.model.config.max_length - len(tokens)
        params = dataclasses.replace(params, max_tokens=max(1, min(params.max_tokens, fitting)))
    with serve(args, parts, [tokens] * options.n, new_tokens=params.max_tokens) as driver:
        output.report(f"weights {driver.version}\n")
        seeds = range(options.seed, options.seed + options.n)
        began = time.monotonic()
        # All of them at once: they share the prefill and the steps.
        texts = [
            TextPieces(driver, tokens, dataclasses.replace(params, seed=seed)) for seed in seeds
        ]
        moments = _print(texts)
    if moments is not None:
        output.report(_summary(len(tokens), texts, [moment - began for moment in moments]))
    return 0


def _print(texts: list[TextPieces]) -> tuple[float, float] | None:
    """Print the texts, each on lines of its own -> when the first and the last token came.

    None if the reader has left; what is left is then not decoded any more.
    """
    first = None
    try:
        for text in texts:
            for piece in text:
                first = time.monotonic() if first is None else first
                if not output.write(piece):
                    return None
            last = time.monotonic()
            if not output.write("\n"):
                return None
    finally:
        for text in texts:
            text.close()
    return first, last


def _summary(prompt_tokens: int, texts: list[TextPieces], seconds: list[float]) -> str:
    """One line: tokens in and out, why each completion ended, and how fast it went."""
    first, last = seconds
    completions = [text.completion for text in texts]
    generated = sum(len(completion.tokens) for completion in completions)
    later = generated - sum(text.first_chunk for text in texts)
    # The first tokens of each came with the prefill; those after them show the speed of decoding.
    speed = f", then {later / (last - first):.1f} tokens/s" if later and last > first else ""
    reasons = ", ".join(completion.finish_reason for completion in completions)
    return (
        f"prompt {prompt_tokens} tokens, generated {generated} ({reasons}), "
        f"first token after {first:.2f} s{speed}\n"
    )

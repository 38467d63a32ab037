"""`jaxrl generate`: complete a prompt with a published version of a run."""

from __future__ import annotations

import sys
from typing import Any

from jaxrl.cli import output
from jaxrl.cli.published import serve_published
from jaxrl.orchestration.samplers import TextSampler


def run(args: Any) -> int:
    """Print `n` completions, one a line; the version goes to stderr. Returns the exit code."""
    options = args.options
    with serve_published(args) as (driver, parts):
        sampler = TextSampler(driver, parts)
        sys.stderr.write(f"weights {driver.version}\n")
        for i in range(options.n):
            completion = sampler.generate(
                options.prompt,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                seed=options.seed + i,
            )
            output.write(completion.text + "\n")
    return 0

"""`jaxrl eval`: accuracy of a published version of a run on its held-out prompts."""

from __future__ import annotations

import json
from typing import Any

from jaxrl.cli import output
from jaxrl.cli.published import serve_published
from jaxrl.orchestration.evaluate import evaluate
from jaxrl.orchestration.samplers import eval_params, make_pool


def run(args: Any) -> int:
    """Print the evaluation as one JSON object; returns the exit code."""
    with serve_published(args) as (driver, parts):
        pool = make_pool(args.config)
        try:
            result = evaluate(
                driver,
                pool,
                parts.eval_prompts[: args.config.eval.size],
                eval_params(parts),
                version=driver.version,
                seed=args.config.seed,
            )
        finally:
            pool.close()
    record = {
        "version": result.version.number,
        "digest": result.version.digest,
        "prompts": result.prompts,
        **result.metrics(),
        "examples": [list(example) for example in result.examples],
    }
    output.write(json.dumps(record, indent=2) + "\n")
    return 0

"""`jaxrl convert`: weights of a run, or published ones, as a folder that other libraries load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jaxrl.cli import output
from jaxrl.cli.published import load_weights, open_parts
from jaxrl.errors import OutputError
from jaxrl.models.safetensors import save_params


def run(args: Any) -> int:
    """Write weights, config.json and tokenizer; prints the folder. Returns the exit code."""
    folder = Path(args.options.to)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        if (folder / name).exists():
            raise OutputError(f"{folder} already holds {name}; choose another --to")
    parts = open_parts(args)
    params, version = load_weights(args, parts)
    save_params(folder, parts.model, params)
    parts.tokenizer.save(folder)
    sys.stderr.write(f"weights {version}\n")
    output.write(f"{folder}\n")
    return 0

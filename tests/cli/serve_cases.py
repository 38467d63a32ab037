"""What the tests of `jaxrl serve` share."""

from __future__ import annotations

from jaxrl.cli import parsing
from jaxrl.config import ModelConfig

MODEL = ModelConfig(
    n_layers=1,
    d_model=16,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    mlp_dim=32,
    vocab_size=259,
    max_length=64,
)


def arguments(*flags: str) -> parsing.Arguments:
    """The parsed command line `jaxrl serve FLAGS`."""
    return parsing.parse_arguments(parsing.COMMANDS["serve"], list(flags))

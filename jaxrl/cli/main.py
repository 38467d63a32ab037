"""The command `jaxrl`: parse, then import what the command needs, then run it."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence

import jaxrl
from jaxrl.cli import parsing
from jaxrl.config import reference
from jaxrl.errors import ConfigError, DataError, JaxrlError, RequestError

EXIT_FAILURE, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130
_USER_ERRORS = (ConfigError, RequestError, DataError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jaxrl` with the arguments (default: those of the process); returns the exit code.

    0: done; 2: a mistake in the command line, the config or the data; 1: another error of jaxrl;
    130: interrupted. Each of these errors is one line on stderr; what is not ours has a traceback.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except JaxrlError as error:
        _report("error", _one_line(error))
        return EXIT_USER if isinstance(error, _USER_ERRORS) else EXIT_FAILURE
    except KeyboardInterrupt:
        _report("error", "interrupted")
        return EXIT_INTERRUPTED


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "help"):
        _write(main_help())
        return 0 if argv else EXIT_USER
    if argv[0] == "--version":
        _write(f"jaxrl {jaxrl.__version__}\n")
        return 0
    command = parsing.find_command(argv[0])
    flags = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if not {"--help", "-h"}.isdisjoint(flags):
        _write(command_help(command))
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        args = parsing.parse_arguments(command, argv[1:])
    for warning in caught:
        _report("warning", " ".join(str(warning.message).split()))
    run = importlib.import_module(command.module).run
    return run(args.config, args) if command.name == "train" else run(args)


def main_help() -> str:
    """What `jaxrl --help` shows."""
    width = max(len(name) for name in parsing.COMMANDS)
    commands = [f"  {c.name:<{width}}  {c.summary}" for c in parsing.COMMANDS.values()]
    lines = [
        "usage: jaxrl COMMAND [FLAGS]",
        "",
        "Asynchronous reinforcement learning of language models in JAX.",
        "",
        "commands:",
        *commands,
        "",
        "jaxrl COMMAND --help lists the flags of a command; jaxrl --version shows the version.",
    ]
    return "\n".join(lines) + "\n"


def command_help(command: parsing.Command) -> str:
    """What `jaxrl COMMAND --help` shows."""
    options = [reference.field_help(field, flag) for flag, field in parsing.option_flags(command)]
    parts = [f"usage: {command.usage}", command.summary, "\n".join(["flags:", *options])]
    if command.name == "train":
        parts += [
            "Every field of the configuration can be set on the command line; the last one wins.",
            reference.config_help(),
        ]
    else:
        parts.append(
            "Every field of the run's config.json can be set as --config.SECTION.FIELD=VALUE;\n"
            "jaxrl train --help lists them."
        )
    return "\n\n".join(parts) + "\n"


def _one_line(error: BaseException) -> str:
    """The message, and those of its causes, without line breaks."""
    text = " ".join(str(error).split()) or type(error).__name__
    cause = error.__cause__
    return f"{text} (cause: {type(cause).__name__}: {_one_line(cause)})" if cause else text


def _report(kind: str, text: str) -> None:
    sys.stderr.write(f"jaxrl: {kind}: {text}\n")


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

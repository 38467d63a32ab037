"""The command `jaxrl`: parse, then import what the command needs, then run it."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence

import jaxrl
from jaxrl.cli import output, parsing
from jaxrl.config import reference
from jaxrl.errors import ConfigError, DataError, JaxrlError, RequestError

EXIT_FAILURE, EXIT_USER = 1, 2
_USER_ERRORS = (ConfigError, RequestError, DataError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jaxrl` with the arguments (default: those of the process); returns the exit code.

    0: done; 2: a mistake in the command line, the config or the data; 1: another error of jaxrl;
    128 + the signal (130: Ctrl-C, 143: SIGTERM): interrupted. Each of these errors is one line on
    stderr; what is not ours has a traceback.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except JaxrlError as error:
        _report("error", _one_line(error))
        return EXIT_USER if isinstance(error, _USER_ERRORS) else EXIT_FAILURE
    except KeyboardInterrupt as error:
        if argv is None:
            # The process is ending: another Ctrl-C must not cut what Python does at exit.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        _report("error", _one_line(error) if str(error) else "interrupted")
        return 128 + getattr(error, "signum", signal.SIGINT)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "help"):
        output.write(main_help())
        return 0 if argv else EXIT_USER
    if argv[0] == "--version":
        output.write(f"jaxrl {jaxrl.__version__}\n")
        return 0
    command = parsing.find_command(argv[0])
    flags = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if not {"--help", "-h"}.isdisjoint(flags):
        output.write(command_help(command))
        return 0
    if os.getcwd() not in sys.path:
        # Last: a file that happens to be called like a library must not take its place.
        sys.path.append(os.getcwd())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        args = parsing.parse_arguments(command, argv[1:])
    for warning in caught:
        _report("warning", " ".join(str(warning.message).split()))
    with _signals_end_the_process():
        run = importlib.import_module(command.module).run
    return run(args.config, args) if command.name == "train" else run(args)


@contextlib.contextmanager
def _signals_end_the_process() -> Iterator[None]:
    """SIGINT and SIGTERM end the process at once: for imports, before anything is open.

    An exception could be lost there: importlib drops those raised inside its own callbacks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: object) -> None:
        os.write(2, b"jaxrl: error: interrupted\n")
        os._exit(128 + signum)

    signums = (signal.SIGINT, signal.SIGTERM)
    previous = {signum: signal.signal(signum, leave) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


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
            "Every field of the configuration can be set as --config.SECTION.FIELD=VALUE;\n"
            "jaxrl train --help lists them."
        )
    return "\n\n".join(parts) + "\n"


def _one_line(error: BaseException) -> str:
    """The message, and those of its causes, without line breaks."""
    text = " ".join(str(error).split()) or type(error).__name__
    if error.__cause__ is None:
        return text
    cause = _one_line(error.__cause__)
    # Many messages quote their cause already.
    return text if cause in text else f"{text} (cause: {type(error.__cause__).__name__}: {cause})"


def _report(kind: str, text: str) -> None:
    output.report(f"jaxrl: {kind}: {text}\n")

"""Command lines to records. Nothing here imports jax, so that a typo is refused at once.

absl reads the flags (`--name=value`, `--name value`, `--noname`, `--flagfile`), the config classes
say which flags there are and check the values. The overrides of `ml_collections` are written the
same way, but that package sets attributes, which frozen dataclasses refuse, and knows neither
`Literal` nor rules between fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from jaxrl.cli.options import (
    ConvertOptions,
    EvalOptions,
    GenerateOptions,
    ServeOptions,
    store_as_run,
    weights_config,
)
from jaxrl.cli.run_options import (
    CompileOptions,
    DebugOptions,
    PlanOptions,
    TrainOptions,
)
from jaxrl.config import kinds
from jaxrl.config.experiment import ExperimentConfig
from jaxrl.config.files import load_config_file
from jaxrl.config.overrides import apply_overrides, parse_field, resolve
from jaxrl.config.schema import leaf_fields, section_info
from jaxrl.config.sections import NO_MEANING
from jaxrl.config.serialize import load_config
from jaxrl.errors import ConfigError

_CONFIG = "config."


@dataclasses.dataclass(frozen=True)
class Command:
    """One command: `module.run` does it, `positional` names the options given without a flag."""

    name: str
    summary: str
    usage: str
    module: str
    options: type
    positional: str | None = None


COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command(
            "train",
            "Train a model as a config file says, or go on with an interrupted run.",
            "jaxrl train [--config=]FILE [--config.SECTION.FIELD=VALUE ...]",
            "jaxrl.cli.train",
            TrainOptions,
        ),
        Command(
            "eval",
            "Evaluate a published model, or a weight version of a run, on questions with answers.",
            "jaxrl eval (--weights=PATH --data=FILE.jsonl | --run=DIR) [--size=N] ...",
            "jaxrl.cli.evaluate",
            EvalOptions,
        ),
        Command(
            "generate",
            "Complete a prompt with a published model, or with a weight version of a run.",
            'jaxrl generate "PROMPT" (--weights=PATH | --run=DIR) [--temperature=T] ...',
            "jaxrl.cli.generate",
            GenerateOptions,
            positional="prompt",
        ),
        Command(
            "serve",
            "Serve a published model, or a run while it trains, over HTTP and gRPC.",
            "jaxrl serve (--weights=PATH | --run=DIR [--follow]) [--http-port=N] ...",
            "jaxrl.cli.serve",
            ServeOptions,
        ),
        Command(
            "convert",
            "Write a weight version of a run, or a GGUF file, as a Hugging Face folder.",
            "jaxrl convert --run=DIR|--weights=PATH --to=FOLDER [--version=N]",
            "jaxrl.cli.convert",
            ConvertOptions,
        ),
        Command(
            "plan",
            "Say how much memory a run needs on each device, and whether it fits.",
            "jaxrl plan [--config=]FILE [--topology=v5e:4x8 | --devices=N --hbm-gb=X] ...",
            "jaxrl.cli.plan",
            PlanOptions,
        ),
        Command(
            "compile",
            "Compile a run for a TPU slice that need not be there: memory, traffic, step time.",
            "jaxrl compile [--config=]FILE --topology=v5e:16x16 [--programs=train,decode] ...",
            "jaxrl.cli.compile",
            CompileOptions,
        ),
        Command(
            "debug",
            "Show the collectives of a run's programs, in the order in which they run.",
            "jaxrl debug collectives RUN|CONFIG [--program=NAME] [--json] ...",
            "jaxrl.cli.debug",
            DebugOptions,
            positional="what target",
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    `options` is the record of the command's own flags (`TrainOptions`, `EvalOptions`, …), `config`
    the validated config with `overrides` (path -> text) applied: that of the config file, of the
    run's config.json, or the one that serves published weights.
    """

    command: str
    options: Any
    config: ExperimentConfig
    overrides: Mapping[str, str]


def find_command(name: str) -> Command:
    """Name -> command. Raises `ConfigError` with the commands there are."""
    if name not in COMMANDS:
        hint = kinds.did_you_mean(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}{hint}")
    return COMMANDS[name]


def parse_arguments(command: Command, argv: Sequence[str]) -> Arguments:
    """Arguments after the command's name -> the record. Raises `ConfigError`."""
    given, words = _read_flags(command, argv)
    overrides = {k.removeprefix(_CONFIG): v for k, v in given.items() if k.startswith(_CONFIG)}
    if command.name == "serve":
        given = store_as_run(given)
    options = _read_options(command, given, words)
    if hasattr(options, "config"):
        config = load_config_file(options.config)
    elif options.run:
        config = load_config(Path(options.run) / "config.json")
    else:
        config = weights_config(options)
    published = config
    config = apply_overrides(config, overrides)
    if getattr(options, "run", ""):
        _check_same_model(published, config)
    if isinstance(options, GenerateOptions):
        options = _with_defaults(options, config)
    elif isinstance(options, EvalOptions):
        config = _with_flags(config, options)
    return Arguments(command.name, options, config, overrides)


def _check_same_model(published: ExperimentConfig, config: ExperimentConfig) -> None:
    """The weights of a run mean what its own config says: with another model they would compute
    something that their version does not name."""
    for field in section_info(type(config.model)).fields.values():
        old, new = (getattr(c.model, field.name) for c in (published, config))
        if old != new and field.name not in NO_MEANING:
            rule = f"{old!r}, as in the run whose weights these are"
            raise ConfigError(f"{field.path}={new!r} must be {rule}")


def option_flags(command: Command) -> Iterator[tuple[str, Any]]:
    """(flag without dashes, field) of the command's own flags."""
    for field in section_info(command.options).fields.values():
        if field.name not in (command.positional or "").split():
            yield field.path.removeprefix("--"), field


def _read_flags(command: Command, argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(flag -> its text, in which the last one wins; arguments that are no flags)."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may follow the prompt
    known = dict(option_flags(command))
    known |= {_CONFIG + path: field for path, field in leaf_fields(ExperimentConfig)}
    known |= {_CONFIG + path: field for path, field in _deprecated_paths(ExperimentConfig)}
    for name, field in known.items():
        boolean = field is not None and field.kind is bool
        flag = flags.Flag(
            flags.ArgumentParser(), flags.ArgumentSerializer(), name, None, "", boolean=boolean
        )
        values[name] = flag
    try:
        words = values([command.name, *argv])[1:]
    except flags.UnrecognizedFlagError as error:
        raise _unknown_flag(command, error.flagname) from None
    except flags.Error as error:
        raise ConfigError(str(error)) from None
    return {name: values[name].value for name in known if values[name].present}, words


def _deprecated_paths(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path that once was a field, the field that replaced it or None).

    They are still understood, or refused with the reason.
    """
    info = section_info(cls)
    for name, entry in info.deprecated.items():
        yield prefix + name, info.fields.get(entry.to)
    for field in info.fields.values():
        if section_info(field.kind) is not None:
            yield from _deprecated_paths(field.kind, f"{prefix}{field.name}.")


def _unknown_flag(command: Command, name: str) -> ConfigError:
    if name.startswith(_CONFIG):
        try:
            resolve(ExperimentConfig, name.removeprefix(_CONFIG))
        except ConfigError as error:
            return error
    own = [flag for flag, _ in option_flags(command)]
    hint = kinds.did_you_mean(name, own, prefix="--")
    return ConfigError(f"unknown flag --{name}{hint or f'; see jaxrl {command.name} --help'}")


def _read_options(command: Command, given: Mapping[str, str], words: Sequence[str]) -> Any:
    """The command's own flags and its positional argument -> its options, checked."""
    values = {
        field.name: parse_field(field, given[flag])
        for flag, field in option_flags(command)
        if flag in given
    }
    if command.positional is not None:
        names = command.positional.split()
        if len(words) != len(names):
            wanted = f"one {names[0]} (in quotes)" if len(names) == 1 else " and ".join(names)
            raise ConfigError(f"{command.name} takes {wanted}, got {len(words)}: {command.usage}")
        fields = section_info(command.options).fields
        for name, word in zip(names, words, strict=True):
            # A text is what it is, whatever it looks like.
            values[name] = word if fields[name].kind is str else parse_field(fields[name], word)
    elif len(words) == 1 and "config" in _missing(command, values):
        values["config"] = words[0]
    elif words:
        raise ConfigError(
            f"unexpected argument {words[0]!r}; values of true-or-false flags need a =, as in "
            "--config.observe.plots=false"
        )
    return command.options(**values)


def _missing(command: Command, values: Mapping[str, Any]) -> set[str]:
    """The options that were not given."""
    return set(section_info(command.options).fields).difference(values)


def _with_defaults(options: GenerateOptions, config: ExperimentConfig) -> GenerateOptions:
    """What was left open is taken from the config.

    Except the length with --weights: how much fits is known once the prompt has been encoded.
    """
    temperature, longest = options.temperature, options.max_new_tokens
    if longest is None and options.run:
        longest = config.rollout.max_new_tokens
    return dataclasses.replace(
        options,
        temperature=config.eval.temperature if temperature is None else temperature,
        max_new_tokens=longest,
    )


def _with_flags(config: ExperimentConfig, options: EvalOptions) -> ExperimentConfig:
    """The config with what the flags of `eval` say."""
    evaluation = {
        name: value
        for name in ("temperature", "max_new_tokens")
        if (value := getattr(options, name)) is not None
    }
    rewards = {"scorer": options.scorer} if options.scorer else {}
    return dataclasses.replace(
        config,
        eval=dataclasses.replace(config.eval, **evaluation),
        rewards=dataclasses.replace(config.rewards, **rewards),
    )

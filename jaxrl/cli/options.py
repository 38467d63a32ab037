"""The flags of each command, and the config that stands in where there is no run. Free of jax."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from jaxrl.config import rules
from jaxrl.config.experiment import ExperimentConfig
from jaxrl.config.schema import common, required, section
from jaxrl.config.sections import (
    MAX_SEED,
    DataConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from jaxrl.errors import ConfigError

NEW_TOKENS = 256
"""Longest completion of published weights, unless a flag says otherwise or the model is shorter."""

SLOTS, SERVED_LENGTH = 8, 4096
"""Sequences that published weights are served with at once, and the longest one, unless flags say
otherwise: the caches of all slots stay in memory."""

_PORT = rules.within(-1, 65535, "0: a free one, -1: none")

_WEIGHTS = (
    "published model: a folder with config.json, model.safetensors and tokenizer.json, or a GGUF "
    "file; asked through its chat template where it has one"
)
_SYSTEM = "what the system says to a chat model before; for --weights"


def _run() -> Any:
    return common("", "output folder of a run; either this or --weights")


def _version(use: str) -> Any:
    rule = rules.at_least(-1, "-1: the newest published one")
    return common(-1, f"weight version to {use}", rule)


def _temperature() -> Any:
    text = "sampling temperature; none for eval.temperature of the run, greedy with --weights"
    return common(None, text, rules.at_least(0))


def _max_length() -> Any:
    text = "longest sequence in tokens, prompt and completion; none for what the model was made for"
    return common(None, f"{text}; for --weights", rules.at_least(2))


@section("--")
class EvalOptions:
    """Flags of `jaxrl eval`."""

    run: str = _run()
    version: int = _version("evaluate")
    weights: str = common("", _WEIGHTS)
    data: str = common(
        "",
        "JSON-lines file (or .jsonl.gz) with question and answer, all of it; needed with "
        "--weights; empty: the held-out prompts of the run",
    )
    answer_format: Literal["auto", "plain", "gsm8k"] = common(
        "auto", "form of the answers in --data, as data.answer_format"
    )
    size: int = common(0, "number of prompts, the first ones", rules.at_least(0, "0: all"))
    scorer: str = common(
        "", "reward function; empty: rewards.scorer of the run, last_number with --weights"
    )
    temperature: float | None = _temperature()
    max_new_tokens: int | None = common(
        None,
        f"longest completion in tokens; none for that of the run, {NEW_TOKENS} with --weights",
        rules.at_least(1),
    )
    max_length: int | None = _max_length()
    raw: bool = common(
        False, "the question alone is the prompt, without data.prompt_template and chat template"
    )
    system: str = common("", _SYSTEM)
    predictions: str = common(
        "", "JSON-lines file to write, with prompt, completion and score; must not exist yet"
    )

    def check(self) -> None:
        """One source of weights, and data for those that bring none."""
        _check_source(self)
        if self.data and not os.path.exists(self.data):
            raise ConfigError(f"--data={self.data}: there is no such file")
        if self.weights and not self.data:
            raise ConfigError("--weights needs --data=FILE.jsonl: a model brings no questions")
        if self.answer_format != "auto" and not self.data:
            raise ConfigError(f"--answer-format={self.answer_format} needs --data")


@section("--")
class GenerateOptions:
    """Flags of `jaxrl generate`, and the prompt."""

    prompt: str = required("the text to complete", rules.non_empty())
    run: str = _run()
    version: int = _version("sample from")
    weights: str = common("", _WEIGHTS)
    temperature: float | None = _temperature()
    max_new_tokens: int | None = common(
        None,
        f"longest completion in tokens; none for rollout.max_new_tokens of the run; {NEW_TOKENS}, "
        "or as many as fit, with --weights",
        rules.at_least(1),
    )
    max_length: int | None = _max_length()
    seed: int = common(0, "seed of the sampling", rules.within(0, MAX_SEED))
    n: int = common(1, "number of completions", rules.within(1, 1000))
    raw: bool = common(
        False,
        "the text is all of the prompt, without data.prompt_template and chat template; it may "
        "hold special tokens",
    )
    system: str = common("", _SYSTEM)

    def check(self) -> None:
        """One source of weights; several greedy completions would all be the same."""
        _check_source(self)
        last = self.seed + self.n - 1
        if last > MAX_SEED:
            rule = f"at most {MAX_SEED - self.n + 1}: each of --n={self.n} has a seed of its own"
            raise ConfigError(f"--seed={self.seed} must be {rule}")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"--n={self.n} must be 1 when sampling is greedy: set --temperature")


@section("--")
class ConvertOptions:
    """Flags of `jaxrl convert`."""

    to: str = required("folder to write, which must not hold a model yet", rules.non_empty())
    run: str = _run()
    version: int = _version("convert")
    weights: str = common("", "published model: a folder as of Hugging Face, or a GGUF file")

    def check(self) -> None:
        """One source of weights."""
        _check_source(self)


@section("--")
class ServeOptions:
    """Flags of `jaxrl serve`."""

    run: str = _run()
    version: int = _version("serve")
    weights: str = common(
        "",
        "published model: a folder as of Hugging Face, or a GGUF file; the folder `weights` of a "
        "run stands for the run",
    )
    follow: bool = common(
        False, "serve each new version of the run as it is published; with --run and no --version"
    )
    host: str = common(
        "127.0.0.1",
        "address to listen on; beyond loopback anybody who reaches it may ask, so set a token",
        rules.non_empty(),
    )
    http_port: int = common(8000, "port of the HTTP API", _PORT)
    grpc_port: int = common(9000, "port of the gRPC API", _PORT)
    slots: int | None = common(
        None,
        f"sequences decoded at once; none for rollout.slots of the run, {SLOTS} with --weights",
        rules.at_least(1),
    )
    max_length: int | None = common(
        None,
        "longest sequence in tokens, prompt and completion; none for what the model was made for, "
        f"at most {SERVED_LENGTH}, and for what a run samples that has rollout.samplers",
        rules.at_least(2),
    )
    prefill_chunk: int = common(
        128,
        "tokens of a prompt that are computed at once, between which running sequences go on: "
        "fewer for smoother streams, more for faster prompts; with rollout.samplers only between "
        "whole prompts or their pieces of up to 256",
        rules.at_least(1),
    )
    prefix_cache_mb: int | None = common(
        None,
        "memory for beginnings of prompts that later ones share, in MiB; none for a quarter of the "
        "slots' cache, at least 64",
        rules.at_least(0),
    )
    max_waiting: int = common(
        256, "requests that may wait for a slot; more are refused", rules.at_least(1)
    )
    timeout_s: float = common(600.0, "longest time for one request in seconds", rules.seconds())
    grace_s: float = common(
        30.0,
        "seconds that running requests have to end when the server is told to stop",
        rules.within(0, 100_000_000),
    )
    in_flight: Literal["run", "finish", "continue", "recompute"] = common(
        "run", "what a sequence does when new weights arrive, as rollout.in_flight; run: as the run"
    )
    token_file: str = common(
        "", "file with the token that clients must send; empty: that in JAXRL_SERVE_TOKEN, or none"
    )
    model_name: str = common("", "what clients call the model; empty: the name of folder or file")

    def check(self) -> None:
        """One source of weights, something to listen on, versions to follow."""
        _check_source(self)
        if self.follow and not self.run:
            raise ConfigError("--follow needs --run: published weights have no later versions")
        if self.follow and self.version >= 0:
            raise ConfigError(
                f"--version={self.version} pins the weights that --follow would replace"
            )
        if self.http_port == self.grpc_port == -1:
            raise ConfigError("--http-port=-1 and --grpc-port=-1: nothing would be served")
        if self.http_port == self.grpc_port > 0:
            raise ConfigError(f"--http-port={self.http_port} and --grpc-port must differ")


def store_as_run(given: dict[str, str]) -> dict[str, str]:
    """Flags of `serve` whose weights are the store of a run, with the run instead: a store alone
    does not know its model. Raises `ConfigError` for a store without its run, and for a run."""
    store = given.get("weights", "")
    if _is_store(os.path.join(store, "weights")):
        raise ConfigError(f"--weights={store} is a run: use --run={store}")
    if given.get("run") or not _is_store(store):
        return given
    run = os.path.dirname(os.path.abspath(store))
    if not os.path.isfile(os.path.join(run, "config.json")):
        raise ConfigError(f"--weights={store} holds versions of a run, but {run} is no run")
    return {**{name: value for name, value in given.items() if name != "weights"}, "run": run}


def _is_store(folder: str) -> bool:
    """Whether it holds versions of weights; the first that a run publishes need not be 0."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(
        name.isdigit() and os.path.isdir(os.path.join(folder, name, "stamp")) for name in names
    )


def published_config(options: ConvertOptions) -> ExperimentConfig:
    """The config that reads `options.weights` whole. Raises `ConfigError`."""
    from jaxrl.config.published import published_model

    return ExperimentConfig(
        model=published_model(options.weights),
        data=DataConfig(
            source="jsonl", path="no data", tokenizer=options.weights, max_prompt_tokens=1
        ),
        train=TrainConfig(steps=0),
        rollout=RolloutConfig(max_new_tokens=1),
    )


def served_config(options: ServeOptions) -> ExperimentConfig:
    """The config that serves `options.weights`. Raises `ConfigError`."""
    from jaxrl.config.published import published_model
    from jaxrl.data.model_files import has_chat_template

    model = published_model(options.weights)
    return ExperimentConfig(
        # Many requests are worth the longer compilation.
        model=dataclasses.replace(model, scan_layers=False),
        data=DataConfig(
            source="jsonl",
            path="no data",
            tokenizer=options.weights,
            max_prompt_tokens=model.max_length - 1,
            chat=has_chat_template(options.weights),
        ),
        train=TrainConfig(steps=0),
        rollout=RolloutConfig(max_new_tokens=1, slots=SLOTS),
        rewards=RewardConfig(scorer="last_number"),
    )


def weights_config(
    options: EvalOptions | GenerateOptions | ConvertOptions | ServeOptions,
) -> ExperimentConfig:
    """The config that serves `options.weights`. It exists in memory only, nothing is trained.

    Raises `ConfigError` for a model that cannot be read or is shorter than what is asked for.
    """
    if isinstance(options, ConvertOptions):
        return published_config(options)
    if isinstance(options, ServeOptions):
        return served_config(options)
    # Here, so that a mistake in other flags is told before numpy is imported.
    from jaxrl.config.published import published_model
    from jaxrl.data.model_files import has_chat_template

    model = published_model(options.weights)
    most = model.max_length
    longest = most if options.max_length is None else options.max_length
    if longest > most:
        raise ConfigError(f"--max-length={longest} must be at most {most}, the model's own")
    new = options.max_new_tokens or min(NEW_TOKENS, longest - 1)
    if new >= longest:
        raise ConfigError(
            f"--max-new-tokens={new} must be below {longest}, the longest sequence: the prompt "
            "needs room too"
        )
    generates = isinstance(options, GenerateOptions)
    chat = not options.raw and has_chat_template(options.weights)
    if options.system and not chat:
        why = "--raw asks without one" if options.raw else f"{options.weights} has none"
        raise ConfigError(f"--system={options.system!r} needs a chat template; {why}")
    # One text is worth no long compilation; many are worth the faster steps it gives.
    model = dataclasses.replace(model, max_length=longest, scan_layers=generates)
    return ExperimentConfig(
        model=model,
        data=DataConfig(
            source="jsonl",
            path=getattr(options, "data", "") or "no data",  # a text alone reads none
            tokenizer=options.weights,
            max_prompt_tokens=longest - new,
            chat=chat,
            system_prompt=options.system,
        ),
        train=TrainConfig(steps=0),
        rollout=RolloutConfig(max_new_tokens=new, steps_per_dispatch=4 if generates else 8),
        rewards=RewardConfig(scorer="last_number"),
    )


def _check_source(options: EvalOptions | GenerateOptions | ConvertOptions | ServeOptions) -> None:
    """Exactly one of --run and --weights, and no flag that belongs to the other."""
    if bool(options.run) == bool(options.weights):
        given = "both are given" if options.run else "neither is given"
        raise ConfigError(f"exactly one of --run and --weights must be given; {given}")
    if options.weights and options.version >= 0:
        raise ConfigError(
            f"--version={options.version} belongs to --run: --weights has no versions"
        )
    if isinstance(options, ConvertOptions | ServeOptions):
        return
    if options.run and options.system:
        raise ConfigError(
            f"--system={options.system!r} belongs to --weights; a run has "
            "--config.data.system_prompt"
        )
    if options.run and options.max_length is not None:
        raise ConfigError(f"--max-length={options.max_length} belongs to --weights")

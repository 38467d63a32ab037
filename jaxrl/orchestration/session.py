"""What every trainer of a run shares: the parts made from its config, its files, its signals."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from jaxrl.config import ExperimentConfig
from jaxrl.config.schema import demand, leaf_fields
from jaxrl.config.sections import NO_MEANING
from jaxrl.config.serialize import load_config, to_dict, to_record
from jaxrl.data.examples import load_examples
from jaxrl.data.prompts import PromptStream, eval_prompts
from jaxrl.data.tokenizers import Tokenizer, load_tokenizer
from jaxrl.distributed import current
from jaxrl.errors import CheckpointError, ConfigError
from jaxrl.inference.shares import check_shares, owned_by_each, sampler_sizes
from jaxrl.models.check import check_mesh
from jaxrl.models.lora import base_model
from jaxrl.models.model import Model, build_model, init_params
from jaxrl.models.narrow import narrow_model
from jaxrl.models.safetensors import check_folder, load_params
from jaxrl.observe.logger import get_logger, setup_logging
from jaxrl.observe.progress import Progress
from jaxrl.observe.tracker import Tracker, Writer
from jaxrl.observe.writers import JsonlWriter, TensorBoardWriter
from jaxrl.orchestration import hosts
from jaxrl.orchestration.inputs import require_same
from jaxrl.orchestration.interrupts import Interrupts
from jaxrl.orchestration.ledger import Ledger, effective, read_ledger
from jaxrl.orchestration.run_dir import RunDir
from jaxrl.rewards.scorers import load_scorer
from jaxrl.sharding import DEFAULT_RULES, make_mesh, process_meshes
from jaxrl.train.checkpoint import CheckpointStore
from jaxrl.types import Prompt
from jaxrl.weights.store import WeightStore

if TYPE_CHECKING:
    from jaxrl.data.chat import ChatPrompts

_LOGGER = get_logger("orchestration")


class Parts:
    """Tokenizer, model, mesh and prompts of a config. Made at first use; nothing is written.

    `devices` are those that the mesh spans (None: all).
    """

    def __init__(self, config: ExperimentConfig, devices: Sequence[jax.Device] | None = None):
        self.config = config
        self._devices = devices

    def check(self) -> None:
        """Raise `ConfigError` for what can only be known with tokenizer and devices at hand."""
        load_scorer(self.config.rewards.scorer)
        self.tokenizer, self.stop_ids, self.mesh  # noqa: B018  # each names what is wrong with it
        if self.chat is not None:
            # A template may refuse the system prompt.
            self.chat.encode("1")
        config, model = self.config, self.config.model
        size = self.tokenizer.vocab_size
        demand(
            not model.vocab_size or model.vocab_size >= size,
            "model.vocab_size",
            model.vocab_size,
            f"0 or at least {size}, the ids of data.tokenizer={config.data.tokenizer!r}",
        )
        check_mesh(self.model.config, self.mesh.shape, length=config.row_length)
        if model.weights:
            check_folder(model.weights, base_model(self.model))
        # Samplers in processes of their own have devices and slots of their own.
        sizes = None if config.rollout.samplers else self.sampler_mesh.shape
        check_shares(config, self.model.config, sizes, hosts.count())

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the config names."""
        return load_tokenizer(self.config.data.tokenizer)

    @functools.cached_property
    def chat(self) -> ChatPrompts | None:
        """How prompts are asked, if `data.chat`. Raises `DataError` if there is no template."""
        data = self.config.data
        if not data.chat:
            return None
        # jinja2 is of use here only.
        from jaxrl.data.chat import ChatPrompts, load_chat_template

        template = load_chat_template(data.tokenizer, self.tokenizer)
        return ChatPrompts(template, data.system_prompt, data.chat_variables)

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion; the first is the one that demonstrations end with."""
        return self.tokenizer.stop_ids if self.chat is None else self.chat.template.stop_ids

    @functools.cached_property
    def model(self) -> Model:
        """The decoder, with the tokenizer's vocabulary unless the config gives a size."""
        size = self.config.model.vocab_size or self.tokenizer.vocab_size
        return build_model(dataclasses.replace(self.config.model, vocab_size=size))

    @property
    def model_meaning(self) -> dict[str, Any]:
        """What the numbers of a checkpoint mean, by field: the model without what only says how
        it is computed, and where it came from. Scanned layers are other tensors."""
        record = to_dict(self.model.config)
        return json.loads(json.dumps({k: v for k, v in record.items() if k not in NO_MEANING}))

    @functools.cached_property
    def served_model(self) -> Model:
        """The model as it is sampled from: its weights in the dtype of the computation."""
        return narrow_model(self.model)

    def initial_params(self, mesh: Mesh | None = None) -> Any:
        """The weights that training starts from, on `mesh` (None: that of training): published
        ones, or random ones of the seed.

        Adapters are always of the seed; what they belong to stays as it is here.
        """
        weights, given, mesh = self.config.model.weights, None, mesh or self.mesh
        if weights:
            given = load_params(weights, base_model(self.model), mesh=mesh)
        return init_params(self.model, self.config.seed, mesh=mesh, given=given)

    def placeholder_params(self) -> Any:
        """Weights whose trained part a checkpoint is about to replace."""
        if self.config.model.lora_rank:
            return self.initial_params()
        return init_params(self.model, 0, mesh=self.mesh)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh over the devices. Raises `ConfigError`."""
        try:
            return make_mesh(**self.config.mesh.sizes(), devices=self._devices)
        except ValueError as error:
            raise ConfigError(f"mesh: {error}") from None

    @functools.cached_property
    def sampler_meshes(self) -> tuple[Mesh, ...]:
        """The mesh that each process samples on, over its own devices. Raises `ConfigError`."""
        processes, shape = hosts.count(), self.mesh.shape
        owned = self.mesh.size
        if processes > 1:
            owned = owned_by_each(device.process_index for device in jax.devices())
        sizes = sampler_sizes(self.config, shape, owned, processes)
        if processes > 1:
            return process_meshes(**sizes)
        same = sizes == dict(shape)
        return (self.mesh if same else make_mesh(**sizes, devices=list(self.mesh.devices.flat)),)

    @property
    def sampler_mesh(self) -> Mesh:
        """The mesh that this process samples on."""
        return self.sampler_meshes[hosts.index() if hosts.count() > 1 else 0]

    @property
    def row_shards(self) -> int:
        """Among how many devices the rows of a batch are divided."""
        return DEFAULT_RULES.shards(self.mesh, "batch")

    @property
    def slot_shards(self) -> int:
        """Among how many devices of this process the slots of its sampler are divided."""
        return DEFAULT_RULES.shards(self.sampler_mesh, "slots")

    @functools.cached_property
    def train_examples(self) -> Sequence[Any]:
        """Training examples."""
        return load_examples(self.config.data, "train")

    @functools.cached_property
    def eval_examples(self) -> Sequence[Any]:
        """Held-out examples."""
        return load_examples(self.config.data, "eval")

    @functools.cached_property
    def train_prompts(self) -> PromptStream:
        """The endless stream of training prompts."""
        return PromptStream(
            self.train_examples,
            self.tokenizer,
            seed=self.config.seed,
            max_prompt_tokens=self.config.data.max_prompt_tokens,
            chat=self.chat,
        )

    @functools.cached_property
    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts."""
        return eval_prompts(
            self.eval_examples,
            self.tokenizer,
            max_prompt_tokens=self.config.data.max_prompt_tokens,
            chat=self.chat,
        )


class Session:
    """An open run: everything that writes. Use as a context manager, or `open` and `close`.

    Of several processes the first one writes; the others write weights and checkpoints with it,
    and `ledger.process-N.jsonl` and a log of their own.
    """

    def __init__(self, config: ExperimentConfig, devices: Sequence[jax.Device] | None = None):
        self.config = config
        self.parts = Parts(config, devices)
        self.run_dir = RunDir(config.output_dir)
        self.interrupts = Interrupts()
        self.saved_version = -1
        self._saving: dict[str, Any] | None = None
        self._stack: ExitStack | None = None

    def open(self) -> Session:
        """Take the output directory, write config.json and open ledger, metrics and stores.

        Raises, before anything is written, `ConfigError` for what `Parts.check` finds, and
        `DataError` where processes have read different files; `OutputError` if the directory cannot
        be written, another run is inside, or another process of this one sees another directory
        there; and `CheckpointError` if `checkpoint.resume` does not fit what is there.
        """
        if self._stack is not None:
            return self
        with ExitStack() as stack:
            # Processes tell each other about their devices at the first use: all at once, now.
            jax.devices()
            require_same(self.parts)
            # The others come after the first, which takes the directory for all of them.
            marks = [b""]
            for turn in (hosts.index() == 0, hosts.index() > 0):
                enter = functools.partial(self._enter, stack, turn, marks[0])
                marks = hosts.together("opening the run", enter)
            self._stack = stack.pop_all()
        return self

    def _enter(self, stack: ExitStack, turn: bool, mark: bytes) -> bytes:
        """Open everything if it is this process's turn; the first one gives the mark by which the
        others know its folder."""
        if turn:
            self.parts.check()
            if hosts.index() == 0:
                stack.enter_context(self.run_dir)
            else:
                self.run_dir.find_mark(mark)
            if hosts.count() > 1:
                current().set_logs(self.run_dir.logs)
            self.checkpoints = CheckpointStore(
                self.run_dir.checkpoints, keep=self.config.checkpoint.keep
            )
            stack.callback(self.checkpoints.close)
            self._check_resume()
            setup_logging(
                self.config.observe.log_level,
                jax.process_index(),
                self.run_dir.logs / f"process-{jax.process_index()}.log",
            )
            enable_compilation_cache(self.config.observe.compilation_cache)
            if hosts.index() == 0:
                self._write_config()
            self.ledger = stack.enter_context(Ledger(self.run_dir.ledger_of(hosts.index())))
            self.store = WeightStore(self.run_dir.weights)
            self.tracker = stack.enter_context(Tracker(self._writers()))
        leads = turn and hosts.index() == 0 and hosts.count() > 1
        return self.run_dir.leave_mark() if leads else b""

    def close(self) -> None:
        """Write what is kept and let other runs into the directory; may be repeated."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            with stack:
                self.note_checkpoint(wait=True)

    def __enter__(self) -> Session:
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def checkpoint_begun(self, version: int, phase: str) -> None:
        """A checkpoint is being written in the background."""
        self.saved_version = version
        self._saving = {"version": version, "phase": phase}

    def note_checkpoint(self, *, wait: bool = False) -> None:
        """Write "checkpointed" to the ledger once the checkpoint is complete on disk, not before.

        Raises `OutputError` if `wait` shows that it could not be written.
        """
        if wait:
            self.checkpoints.wait()
        saving = self._saving
        if saving is None or saving["version"] not in self.checkpoints.steps():
            return
        self._saving = None
        self.ledger.append("checkpointed", **saving)
        _LOGGER.info("checkpoint at version %d", saving["version"])

    @contextmanager
    def working(self) -> Iterator[None]:
        """The run trains: signals interrupt it. With several processes only where all of them
        learn of it: in `hosts.together`, within `interrupts.released()`."""
        with self.interrupts, self.interrupts.held() if hosts.count() > 1 else nullcontext():
            yield

    def stop_if_asked(self) -> None:
        """Raise `Interrupted` on every process if a signal came to one of them."""
        if hosts.count() > 1:
            hosts.together("looking for signals", self._look)

    def _look(self) -> bytes:
        with self.interrupts.released():
            return b""

    @contextmanager
    def step(self) -> Iterator[None]:
        """A section that a first Ctrl-C does not cut."""
        with self.interrupts.held():
            yield

    @property
    def metrics_path(self) -> Path:
        """The metrics of the run as JSON lines."""
        return self.run_dir.metrics / "metrics.jsonl"

    def _check_resume(self) -> None:
        found, policy = self.checkpoints.latest(), self.config.checkpoint.resume
        if found is None and policy == "must":
            raise CheckpointError(
                f"checkpoint.resume='must', but {self.run_dir.checkpoints} holds no checkpoint"
            )
        if found is not None and policy != "never":
            # Before config.json is replaced: it goes on describing the run that is there.
            self._check_same_model(found)
        used = self.run_dir.ledger.exists() and self.run_dir.ledger.stat().st_size > 0
        if found is None and used:
            self._check_nothing_is_lost()
        if policy == "never" and (found is not None or used):
            raise CheckpointError(
                f"checkpoint.resume='never', but {self.run_dir.path} holds an earlier run; "
                "choose another output_dir"
            )

    def _check_same_model(self, number: int) -> None:
        """Another seed or model would give the weights in the checkpoint another meaning, also
        where no tensor shows it: lora_alpha and rope_theta are no tensors."""
        meta = self.checkpoints.read_meta(number)
        made, now = {"seed": meta["seed"]}, {"seed": self.config.seed}
        # Checkpoints of older releases do not say.
        made |= {f"model.{name}": value for name, value in meta.get("model", {}).items()}
        now |= {f"model.{name}": value for name, value in self.parts.model_meaning.items()}
        other = [name for name, value in now.items() if made.get(name, value) != value]
        if other:
            before = ", ".join(f"{name}={made[name]!r}" for name in other)
            after = ", ".join(f"{name}={now[name]!r}" for name in other)
            raise CheckpointError(
                f"checkpoint {number} was made with {before}, the config has {after}; "
                f"choose another output_dir, or the same {' and '.join(other)}"
            )

    def _check_nothing_is_lost(self) -> None:
        """Without any checkpoint, starting anew is right only if none was ever complete."""
        records = effective(read_ledger(self.run_dir.ledger))
        written = [r["version"] for r in records if r["event"] == "checkpointed"]
        if written:
            raise CheckpointError(
                f"{self.run_dir.ledger} says that checkpoint {written[-1]} was written, but "
                f"{self.run_dir.checkpoints} holds none; put it back or choose another output_dir"
            )

    def _write_config(self) -> None:
        """Keep the config; say what changed. Of a finished run it stays as it was."""
        steps = self.config.sft.steps + self.config.train.steps
        if self.checkpoints.latest() == steps and self.run_dir.config.exists():
            return
        if changes := self._changes():
            _LOGGER.warning("the config of this run changes: %s", "; ".join(changes))
        self.run_dir.write_config(to_record(self.config))

    def _changes(self) -> list[str]:
        """What differs from the config that the run has on disk."""
        try:
            before = load_config(self.run_dir.config)
        except ConfigError:
            return []
        changes = []
        for path, _ in leaf_fields(ExperimentConfig):
            old, new = (operator.attrgetter(path)(config) for config in (before, self.config))
            if old != new:
                changes.append(f"{path}: {old!r} -> {new!r}")
        return changes

    def _writers(self) -> list[Writer]:
        observe = self.config.observe
        if hosts.index() > 0:
            return []
        writers: list[Writer] = [JsonlWriter(self.metrics_path)]
        if observe.tensorboard:
            writers.append(TensorBoardWriter(self.run_dir.metrics / "tensorboard"))
        if observe.progress:
            total = self.config.sft.steps + self.config.train.steps
            writers.append(Progress(total))
        return writers


def enable_compilation_cache(setting: str) -> None:
    """Keep compiled programs between processes: in the folder `setting`, or the user's cache.

    "off" leaves JAX as it is configured. A folder that cannot be written costs time, not the run.
    """
    if setting == "off" or (not setting and jax.config.jax_compilation_cache_dir):
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(setting) if setting else home / "jaxrl" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _LOGGER.warning("no compilation cache: cannot create %s: %s", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

"""A config on a number of devices: model, mesh and batch shape, checked before anything is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxrl.config import ExperimentConfig, MeshConfig, SamplerMeshConfig
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.errors import ConfigError, DataError
from jaxrl.inference.engine import Engine
from jaxrl.inference.shares import check_shares, sampler_sizes
from jaxrl.models.check import check_mesh
from jaxrl.models.model import Model, build_model
from jaxrl.models.narrow import narrow_model
from jaxrl.rollout.collate import rows_for
from jaxrl.sharding import AXES, DEFAULT_RULES, make_mesh
from jaxrl.sharding.mesh import resolve_sizes
from jaxrl.train.objectives import Objective, grpo_objective, sft_objective
from jaxrl.train.optimizer import Optimizer, make_optimizer


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the trainers make of `config` on `mesh`, which may be one of devices that nobody has.

    Each of `processes` samples on a `sampler_mesh` of its own devices.
    """

    config: ExperimentConfig
    model: Model
    mesh: Mesh | AbstractMesh
    sampler_mesh: Mesh | AbstractMesh
    processes: int = 1

    def mesh_of(self, program: str) -> Mesh | AbstractMesh:
        """The mesh that a program of `programs.NAMES` runs on."""
        return self.mesh if program == "train" else self.sampler_mesh

    @functools.cached_property
    def served_model(self) -> Model:
        """The model as it is sampled from."""
        return narrow_model(self.model)

    @property
    def phase(self) -> str:
        """The updates that are looked at: "rl", or "sft" where there are no others, or ""."""
        if self.config.train.steps:
            return "rl"
        return "sft" if self.config.sft.steps else ""

    @property
    def row_shards(self) -> int:
        """Among how many devices the rows of a batch are divided."""
        return DEFAULT_RULES.shards(self.mesh, "batch")

    @property
    def rows(self) -> int:
        """Rows of a batch, with all its micro-batches."""
        config = self.config
        section = config.train if self.phase == "rl" else config.sft
        return rows_for(
            section.batch_size,
            config.longest_sequence,
            config.row_length,
            micro_batches=section.micro_batches,
            data_axes=self.row_shards,
        )

    @property
    def micro_batches(self) -> int:
        """Parts of a batch."""
        config = self.config
        return (config.train if self.phase == "rl" else config.sft).micro_batches

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the phase."""
        return make_optimizer(self.config.train if self.phase == "rl" else self.config.sft)

    @property
    def objective(self) -> Objective:
        """The objective of the phase."""
        config, chunk = self.config, self.config.train.logprob_chunk
        if self.phase == "sft":
            return sft_objective(logprob_chunk=chunk)
        temperature = config.rollout.temperature
        return grpo_objective(config.algorithm, temperature=temperature, logprob_chunk=chunk)

    @functools.cached_property
    def engine(self) -> Engine:
        """The decode engine of one process; it holds no weights and has compiled nothing."""
        config = self.config
        return Engine(
            self.served_model,
            slots=config.rollout.slots // self.processes,
            max_length=config.longest_sampled,
            prefill_buckets=config.prompt_buckets,
            steps_per_dispatch=config.rollout.steps_per_dispatch,
            mesh=self.sampler_mesh,
        )


def make_layout(
    config: ExperimentConfig,
    n_devices: int,
    devices: Sequence[jax.Device] | None = None,
    *,
    processes: int = 1,
    sampler_devices: Sequence[jax.Device] | None = None,
) -> Layout:
    """The layout on `n_devices`; on abstract meshes where there are no `devices`.

    `processes` have an equal part of the devices each, and sample on it: `sampler_devices` is that
    of one of them (None: `devices`, where there is one process).

    Reads the tokenizer only where the config does not say the size of its vocabulary, and no data
    or weights. Raises `ConfigError` with the numbers for axes that do not multiply to the devices,
    and for what they cannot split.
    """
    asked = config.mesh.sizes()
    try:
        shape = resolve_sizes({axis: asked[axis] for axis in AXES}, n_devices)
    except ValueError as error:
        raise ConfigError(f"mesh: {error}") from None
    sizes = dict(zip(AXES, shape, strict=True))
    # Made again, so that what an axis of -1 became is checked like a number in the config.
    model = dataclasses.replace(config.model, vocab_size=_vocabulary(config))
    config = dataclasses.replace(config, mesh=MeshConfig(**sizes), model=model)
    if n_devices % processes:
        raise ConfigError(f"{n_devices} devices must be a multiple of {processes} processes")
    if config.rollout.samplers:
        # Their mesh is one of other devices.
        config = dataclasses.replace(config, sampler_mesh=SamplerMeshConfig())
    inner = sampler_sizes(config, sizes, n_devices // processes, processes)
    mesh = make_mesh(**sizes, devices=devices) if devices else _abstract(sizes)
    if sampler_devices is None and processes == 1:
        sampler_devices = devices
    sampler = make_mesh(**inner, devices=sampler_devices) if sampler_devices else _abstract(inner)
    layout = Layout(config, build_model(model), mesh, sampler, processes)
    _check(layout)
    return layout


def _abstract(sizes: dict[str, int]) -> AbstractMesh:
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def _vocabulary(config: ExperimentConfig) -> int:
    if config.model.vocab_size:
        return config.model.vocab_size
    try:
        return load_tokenizer(config.data.tokenizer).vocab_size
    except DataError as error:
        raise ConfigError(f"model.vocab_size=0 needs the tokenizer: {error}") from None


def _check(layout: Layout) -> None:
    config, sizes = layout.config, layout.mesh.shape
    check_mesh(
        layout.model.config,
        sizes,
        rows=layout.rows // layout.micro_batches if layout.phase else None,
        length=config.row_length,
    )
    sampled = None if config.rollout.samplers else layout.sampler_mesh.shape
    check_shares(config, layout.model.config, sampled, layout.processes)
    try:
        layout.model.shardings(layout.mesh)
    except ValueError as error:
        raise ConfigError(" ".join(str(error).split())) from None

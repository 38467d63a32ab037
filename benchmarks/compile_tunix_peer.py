"""google-tunix's GRPO update compiled for a TPU slice; run by `compile_peers.py`.

`python benchmarks/compile_tunix_peer.py CASE FOLDER`, in an environment of its own: CASE is the
JSON of a case of `compile_peers.py`. Writes the compiled program as text to FOLDER/program.hlo;
prints the compiler's count of its memory as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compile_cases import memory_of
from flax import nnx
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shapes import emit
from tunix.rl import function_registry, trainer
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
from tunix_peer import make_model

PAD, END = 0, 10**6


def make_trainer(shape: dict, dtype: str) -> trainer.Trainer:
    """The trainer of an RLCluster with the loss of a GRPOLearner, around weights of no content."""
    made = []

    def make() -> tuple[nnx.Module, nnx.Optimizer]:
        model = make_model(shape)
        weights = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), weights))
        config = trainer.peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=1)
        made.append(trainer.Trainer(model, optax.adamw(1e-4), config, dict))
        return made[0].model, made[0].optimizer

    model, optimizer = nnx.eval_shape(make)
    made[0].model, made[0].optimizer = model, optimizer
    config = GRPOConfig(num_generations=8, num_iterations=1, beta=0.0, epsilon=0.2)
    config.temperature = 1.0
    policy_loss = function_registry.get_policy_loss_fn(config.policy_loss_fn)

    def loss(model: nnx.Module, train_example: TrainExample) -> object:
        return policy_loss(model, train_example, algo_config=config, pad_id=PAD, eos_id=END)

    made[0].with_loss_fn(loss, has_aux=True)
    made[0].with_gen_model_input_fn(lambda example: {"train_example": example})
    return made[0]


def place(module: nnx.Module, mesh: Mesh) -> None:
    """Give every array of the module the sharding that its own annotations ask for."""
    state = nnx.state(module)
    specs = nnx.get_partition_spec(state)

    def placed(array: jax.ShapeDtypeStruct, spec: object) -> jax.ShapeDtypeStruct:
        to = NamedSharding(mesh, spec if isinstance(spec, PartitionSpec) else PartitionSpec())
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=to)

    nnx.update(module, jax.tree.map(placed, state, specs))


def make_example(rows: int, prompt: int, new: int, mesh: Mesh) -> TrainExample:
    """A batch of shapes, divided as the trainer divides it: rows over `fsdp`."""

    def array(shape: tuple[int, ...], dtype: object) -> jax.ShapeDtypeStruct:
        to = NamedSharding(mesh, PartitionSpec("fsdp"))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=to)

    return TrainExample(
        prompt_ids=array((rows, prompt), jnp.int32),
        prompt_mask=array((rows, prompt), jnp.bool_),
        completion_ids=array((rows, new), jnp.int32),
        completion_mask=array((rows, new), jnp.bool_),
        advantages=array((rows,), jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=array((rows, new), jnp.float32),
    )


def main() -> None:
    """Compile, write, print."""
    case, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    devices = topologies.get_topology_desc(case["topology"], platform="tpu").devices
    grid = mesh_utils.create_device_mesh(
        (case["fsdp"], case["tensor"]), np.asarray(devices, dtype=object)
    )
    mesh = Mesh(grid, ("fsdp", "tp"))
    made = make_trainer(case["shape"], case["dtype"])
    place(made.model, mesh)
    place(made.optimizer, mesh)
    step, _ = made.jit_train_and_eval_step()
    example = make_example(case["rows"], case["prompt"], case["new"], mesh)
    began = time.monotonic()
    # The model leaves its activations where they are if the first device is a CPU.
    with mesh, mock.patch("jax.devices", return_value=list(devices)):
        lowered = step.func.lower(*step.args, example)
    compiled = lowered.compile()
    seconds = time.monotonic() - began
    (folder / "program.hlo").write_text(compiled.as_text())
    emit({**memory_of(compiled), "compile_s": round(seconds, 1)})


if __name__ == "__main__":
    main()

"""A config on a number of devices: what is checked before anything is compiled."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from planning.planned import MODEL, small_config

from jaxrl.config import MeshConfig
from jaxrl.errors import ConfigError
from jaxrl.models.model import init_params
from jaxrl.planning.layout import make_layout
from jaxrl.planning.programs import active_params, lower, work_of
from jaxrl.train.engine import TrainEngine


def test_make_layout_open_axis_takes_the_devices_that_the_others_leave():
    layout = make_layout(small_config(mesh={"data": -1, "fsdp": 4, "tensor": 2}), 32)

    assert layout.mesh.shape["data"] == 4
    assert layout.row_shards == 16
    assert layout.config.mesh == MeshConfig(data=4, fsdp=4, tensor=2)


@pytest.mark.parametrize(
    ("sections", "devices", "message"),
    [
        ({"mesh": {"data": 4, "tensor": 2}}, 4, "product 8.: more devices than the 4"),
        ({"mesh": {"data": 2, "tensor": 2}}, 16, "must multiply to the 16 devices"),
        ({"mesh": {"tensor": 3, "data": 1}}, 3, "mesh.tensor=3 must be a divisor of model.n_heads"),
        ({"mesh": {"data": 1, "tensor": -1}}, 8, "mesh.tensor=8 must be a divisor of model.n_h"),
        ({"mesh": {"data": 1, "fsdp": -1}}, 128, "mesh.fsdp=128 must be a divisor of model.d_m"),
        ({"mesh": {"fsdp": 32, "data": 1}}, 32, "slots=16 must be a multiple of fsdp=32"),
        (
            {"mesh": {"context": 3, "data": 1}}, 3,
            "row length=64 must be divisible by mesh.context=3",
        ),
        (
            {"mesh": {"expert": 4, "data": 1}, "model": {"n_experts": 6}}, 4,
            "model.n_experts=6 must be divisible by mesh.expert=4",
        ),
        ({"mesh": {"tensor": 2, "data": 1}, "model": {"vocab_size": 255}}, 2, "_size=255 must be"),
        (
            {"model": {"vocab_size": 0}, "data": {"tokenizer": "nowhere/tokenizer.json"}}, 1,
            "model.vocab_size=0 needs the tokenizer: .*nowhere/tokenizer.json",
        ),
    ],
)  # fmt: skip
def test_make_layout_impossible_split_is_refused_with_the_numbers(sections, devices, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_layout(small_config(**sections), devices)

    assert "\n" not in str(error.value)


@pytest.mark.parametrize("phase", ["rl", "sft"])
def test_lower_train_is_the_program_that_the_engine_runs(phase):
    steps = {"train": {"steps": 4 if phase == "rl" else 0}, "sft": {"steps": 4, "batch_size": 8}}
    config = small_config(mesh={"data": 2, "fsdp": 2, "tensor": 2}, **steps)
    layout = make_layout(config, 8, jax.devices())
    engine = TrainEngine(
        layout.model,
        init_params(layout.model, 0, mesh=layout.mesh),
        layout.optimizer,
        layout.objective,
        mesh=layout.mesh,
        micro_batches=layout.micro_batches,
    )

    got = lower(layout, "train")

    names = got.args_info[0][2]
    whole = {n: np.zeros((layout.rows, 64), names[n].dtype) for n in names}
    engine_program = engine._update.lower(engine.state, engine.frozen, engine._place(whole))
    assert layout.phase == phase
    assert engine_program.as_text() == got.as_text()


def test_lower_allocates_no_array():
    layout = make_layout(small_config(mesh={"fsdp": 4, "data": 1}), 4, jax.devices()[:4])
    # Held, so that what other tests left is not freed meanwhile.
    before = jax.live_arrays()
    known = set(map(id, before))

    for name in ("train", "prefill", "decode"):
        lower(layout, name)

    assert [array for array in jax.live_arrays() if id(array) not in known] == []


def test_work_of_an_update_is_six_operations_for_each_weight_and_token():
    layout = make_layout(small_config(), 1)

    work = work_of(layout, "train")

    assert work.tokens == layout.rows * 64
    assert work.model_flops == 6 * layout.model.n_params * work.tokens


def test_work_of_decoding_is_that_of_all_steps_of_a_dispatch():
    layout = make_layout(small_config(rollout={"steps_per_dispatch": 4}), 1)

    work = work_of(layout, "decode")

    assert (work.steps, work.tokens) == (4, 4 * 16)
    assert work.model_flops == 2 * layout.model.n_params * 4 * 16


def test_active_params_count_the_experts_of_one_token_and_no_table_that_is_looked_up():
    experts = {"n_experts": 8, "experts_per_token": 2, "tie_embeddings": False}
    layout = make_layout(small_config(model=experts), 1)

    one = 3 * MODEL["d_model"] * MODEL["mlp_dim"]
    looked_up = MODEL["vocab_size"] * MODEL["d_model"]
    expected = layout.model.n_params - MODEL["n_layers"] * 6 * one - looked_up
    assert active_params(layout) == expected

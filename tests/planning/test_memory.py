"""The plan of a run's memory: state exact, the rest near what compilers say."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from planning.planned import small_config, with_algorithm

from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.models.model import init_params
from jaxrl.planning.layout import make_layout
from jaxrl.planning.memory import plan_memory
from jaxrl.planning.programs import active_params, lower
from jaxrl.sharding import bytes_per_device
from jaxrl.train.engine import TrainEngine

FACTOR = 2.0
"""How far an estimate may be from the compiler's number, either way (docs/planning.md)."""


@pytest.mark.parametrize(
    "options", [{}, {"moment_dtype": "bfloat16"}, {"optimizer": "adafactor"}], ids=str
)
def test_plan_of_the_state_is_what_an_engine_holds_and_needs_no_devices(options):
    config = small_config(mesh={"data": 2, "fsdp": 2, "tensor": 2}, train=options)
    real = make_layout(config, 8, jax.devices())
    engine = TrainEngine(
        real.model,
        init_params(real.model, 0, mesh=real.mesh),
        real.optimizer,
        real.objective,
        mesh=real.mesh,
    )

    plan = plan_memory(make_layout(config, 8))

    assert plan.resident["weights"] == bytes_per_device(engine.params)
    assert plan.resident["optimizer state"] == bytes_per_device(engine.state.opt_state)
    assert plan.resident["KV cache"] == bytes_per_device(real.engine.init_state())


def test_plan_of_a_slice_larger_than_any_here_halves_with_twice_the_devices():
    sizes = {"model": {"d_model": 4096, "n_heads": 32, "head_dim": 128}}
    few = plan_memory(make_layout(small_config(mesh={"data": 1, "fsdp": -1}, **sizes), 16))
    more = small_config(mesh={"data": 1, "fsdp": 16, "tensor": -1}, **sizes)

    halved = plan_memory(make_layout(more, 32))

    ratio = few.resident["optimizer state"] / halved.resident["optimizer state"]
    assert ratio == pytest.approx(2, rel=0.01)


def test_plan_of_a_reference_counts_it_where_it_lies():
    config = with_algorithm(small_config(), kl_coef=0.1)
    here = plan_memory(make_layout(config, 1))
    away = plan_memory(make_layout(with_algorithm(config, ref_offload=True), 1))
    none = plan_memory(make_layout(small_config(), 1))

    assert here.resident["reference weights"] == here.resident["weights"]
    assert away.resident["reference weights"] == 0
    assert away.programs["reference"]["visiting reference weights"] == here.resident["weights"]
    assert "reference" not in none.programs


def test_plan_of_adapters_keeps_moments_and_copies_of_adapters_only():
    plan = plan_memory(make_layout(small_config(model={"lora_rank": 4}), 1))

    assert plan.resident["optimizer state"] < plan.resident["weights"]
    assert plan.resident["weights of the sampler"] < plan.resident["weights"] / 2


def test_plan_with_samplers_elsewhere_counts_nothing_of_them():
    here = plan_memory(make_layout(small_config(), 2))
    away = {"samplers": ("http://10.0.0.2:8000",)}

    plan = plan_memory(make_layout(small_config(rollout=away), 2))

    assert plan.resident["weights of the sampler"] == plan.resident["KV cache"] == 0
    assert set(here.programs) - set(plan.programs) == {"publish", "prefill", "decode"}
    assert plan.resident["optimizer state"] == here.resident["optimizer state"]


def test_plan_without_training_holds_weights_once():
    plan = plan_memory(make_layout(small_config(train={"steps": 0}), 1))

    assert set(plan.resident) == {"weights of the sampler", "KV cache"}
    assert set(plan.programs) == {"prefill", "decode"}


def test_plan_is_the_same_where_the_tokenizer_says_the_size_of_the_vocabulary():
    size = load_tokenizer("bytes").vocab_size
    data = {"tokenizer": "bytes"}
    given, read = (
        make_layout(small_config(data=data, model={"vocab_size": n, "tie_embeddings": False}), 1)
        for n in (size, 0)
    )

    assert plan_memory(read) == plan_memory(given)
    assert plan_memory(read).programs["decode"]["logits"] > 0
    assert active_params(read) == active_params(given)


def test_peak_is_the_resident_part_and_the_hungriest_program():
    plan = plan_memory(make_layout(small_config(), 1))

    most = max(sum(parts.values()) for parts in plan.programs.values())
    assert plan.peak == sum(plan.resident.values()) + most


MEDIUM = {
    "n_layers": 4, "d_model": 256, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "mlp_dim": 1024,
    "vocab_size": 4096, "max_length": 256, "scan_layers": True,
}  # fmt: skip


def medium_layout(mesh, remat, devices, **train):
    config = small_config(
        model={**MEDIUM, "remat": remat},
        data={"max_prompt_tokens": 128},
        mesh=mesh,
        train={"batch_size": 32, "logprob_chunk": 512, **train},
        rollout={"max_new_tokens": 128, "slots": 32},
    )
    return make_layout(config, len(devices), devices)


@pytest.mark.parametrize(
    ("mesh", "remat", "train"),
    [
        ({"data": 1, "fsdp": 8}, "full", {}),
        ({"data": 8}, "dots", {}),
        pytest.param({"data": 1, "fsdp": 2, "tensor": 4}, "none", {}, marks=pytest.mark.slow),
        pytest.param(
            {"data": 1, "fsdp": 4, "tensor": 2},
            "full",
            {"micro_batches": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_estimate_of_the_train_step_is_near_the_compilers(mesh, remat, train):
    layout = medium_layout(mesh, remat, jax.devices(), **train)

    compiled = lower(layout, "train").compile().memory_analysis().temp_size_in_bytes

    ratio = sum(plan_memory(layout).programs["train"].values()) / compiled
    assert 1 / FACTOR < ratio < FACTOR


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_estimate_of_sampling_is_near_the_compilers(name):
    layout = medium_layout({"data": 1, "fsdp": 8}, "none", jax.devices())

    compiled = lower(layout, name).compile().memory_analysis().temp_size_in_bytes

    ratio = sum(plan_memory(layout).programs[name].values()) / compiled
    assert 1 / FACTOR < ratio < FACTOR


def test_estimate_falls_with_each_option_that_saves_memory():
    layout = medium_layout({"data": 8}, "none", jax.devices())
    peaks = [plan_memory(layout).peak]

    for section, change in (
        ("model", {"remat": "dots"}),
        ("model", {"remat": "full"}),
        ("train", {"moment_dtype": "bfloat16"}),
        ("train", {"moment_dtype": "float32", "optimizer": "adafactor"}),
    ):
        changed = dataclasses.replace(getattr(layout.config, section), **change)
        config = dataclasses.replace(layout.config, **{section: changed})
        layout = make_layout(config, 8)
        peaks.append(plan_memory(layout).peak)

    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


@pytest.mark.parametrize("mesh", [{}, {"data": 1, "context": 2}], ids=["one device", "context"])
def test_plan_of_a_chunk_beyond_the_batch_is_that_of_the_whole_batch(mesh):
    def logits(chunk):
        config = small_config(mesh=mesh, train={"logprob_chunk": chunk})
        return plan_memory(make_layout(config, 2 if mesh else 1)).programs["train"]["logits"]

    tokens = 16 * 64  # all rows, each of the longest length

    assert logits(10**12) == logits(tokens) == 2 * logits(tokens // 2)

"""A sampler with a mesh and a dtype of its own: proven from disk, and without another number."""

from __future__ import annotations

import jax

from jaxrl.config import MeshConfig, SamplerMeshConfig
from jaxrl.models.narrow import narrow
from jaxrl.orchestration.ledger import read_ledger
from jaxrl.orchestration.rl import RLTrainer
from jaxrl.weights.digest import compute_digest
from jaxrl.weights.store import WeightStore

WIDE = {
    "n_layers": 2, "d_model": 32, "n_heads": 2, "n_kv_heads": 2, "head_dim": 16, "mlp_dim": 64,
    "vocab_size": 128, "dtype": "bfloat16",
}  # fmt: skip


def test_narrow_copy_on_another_mesh_can_be_made_again_from_the_store(make_config):
    config = make_config(
        model=WIDE,
        mesh=MeshConfig(data=1, fsdp=4),
        sampler_mesh=SamplerMeshConfig(tensor=2, fsdp=1),
        sft={"steps": 1},
        train={"steps": 2},
    )

    with RLTrainer(config, devices=jax.devices()[:4]) as trainer:
        trainer.fit()
        served, shape = trainer.parts.served_model, trainer.parts.sampler_mesh.shape

    assert (shape["tensor"], shape["data"], shape["fsdp"]) == (2, 2, 1)
    published = {
        record["version"]: record["sampled_as"]
        for record in read_ledger(trainer.session.run_dir.ledger)
        if record["event"] == "published" and record["where"] == "memory"
    }
    store = WeightStore(trainer.session.run_dir.weights, read_only=True)
    assert list(published) == store.numbers() == [1, 2, 3]
    for number, digest in published.items():
        params, version = store.restore(number, trainer.parts.model.abstract)
        assert digest != version.digest
        assert compute_digest(narrow(params, served.abstract)) == digest


def test_narrow_copy_samples_what_the_wide_one_does(make_config, monkeypatch):
    def digest_of(config) -> str:
        with RLTrainer(config, devices=jax.devices()[:1]) as trainer:
            trainer.fit()
            return trainer.version.digest

    changes = {"model": WIDE, "sft": {"steps": 1}, "train": {"steps": 2}}
    slim = digest_of(make_config("slim", **changes))
    monkeypatch.setattr("jaxrl.orchestration.session.narrow_model", lambda model: model)

    assert digest_of(make_config("wide", **changes)) == slim

"""Weights in and out of safetensors: the same numbers, checked before anything is read."""

from __future__ import annotations

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.config import ModelConfig, published_model
from jaxrl.errors import CheckpointError, ConfigError, OutputError
from jaxrl.models.model import build_model, stack_layers
from jaxrl.models.safetensors import check_folder, load_params, save_params
from jaxrl.sharding import make_mesh

GEMMA = {
    "activation": "gelu", "norm_offset": True, "post_norms": True, "scale_embedding": True,
}  # fmt: skip
VARIANTS = {
    "tied": {},
    "qk_norm": {"qk_norm": True, "tie_embeddings": False},
    "qkv_bias": {"qkv_bias": True},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {
        "qkv_bias": True,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "bfloat16": {"param_dtype": "bfloat16"},
    "qwen3_moe": {"n_experts": 3, "qk_norm": True, "tie_embeddings": False},
    "mixtral": {"n_experts": 3, "sliding_window": 9, "tie_embeddings": False},
    "gemma2": {
        **GEMMA, "sliding_window": 4, "global_every": 2, "attention_softcap": 5.0,
        "logits_softcap": 9.0, "query_scale": 3.5,
    },
    "gemma3": {
        **GEMMA, "qk_norm": True, "sliding_window": 4, "global_every": 6, "local_rope_theta": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}  # fmt: skip


@pytest.fixture
def saved(make_model, tmp_path):
    """Function (**changes) -> (model, params, the folder that they were written to)."""

    def save(**changes):
        model, params = make_model(**changes)
        save_params(tmp_path / "model", model, params)
        return model, params, tmp_path / "model"

    return save


def _assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def _edit(folder, change) -> None:
    """Apply `change` to the tensors of the file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_save_then_load_gives_the_same_weights_and_config(saved, changes):
    model, params, folder = saved(**changes)

    config = published_model(folder, param_dtype=model.config.param_dtype)

    assert config == dataclasses.replace(model.config, weights=str(folder))
    _assert_equal(load_params(folder, build_model(config)), params)
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_load_onto_a_mesh_places_every_weight(saved):
    model, params, folder = saved()
    mesh = make_mesh(data=2, fsdp=2, tensor=2)

    loaded = load_params(folder, model, mesh=mesh)

    _assert_equal(loaded, params)
    want = model.shardings(mesh)
    assert jax.tree.all(jax.tree.map(lambda x, place: x.sharding == place, loaded, want))


@pytest.mark.parametrize("changes", [{}, {"n_experts": 4}], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "mesh", [None, {"fsdp": 4, "tensor": 2}, {"expert": 4, "tensor": 2}], ids=str
)
def test_load_scanned_layers_stacks_them(saved, mesh, changes):
    model, params, folder = saved(**changes)
    scanned = build_model(dataclasses.replace(model.config, scan_layers=True))

    loaded = load_params(folder, scanned, mesh=mesh and make_mesh(**mesh))

    _assert_equal(loaded, stack_layers(params))


@pytest.mark.parametrize("changes", [{}, {"n_experts": 3}], ids=["dense", "experts"])
def test_save_scanned_layers_gives_the_file_of_unrolled_ones(make_model, tmp_path, changes):
    model, params = make_model(**changes)
    scanned = build_model(dataclasses.replace(model.config, scan_layers=True))

    save_params(tmp_path / "a", model, params)
    save_params(tmp_path / "b", scanned, stack_layers(params))

    _assert_equal(*(load_file(tmp_path / name / "model.safetensors") for name in "ab"))


def test_load_several_files_by_their_index(saved):
    model, params, folder = saved()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))

    _assert_equal(load_params(folder, model), params)

    save_file({name: tensors[name] for name in names[4:]}, folder / "two.safetensors")
    with pytest.raises(CheckpointError, match=f"'{names[4]}' is in two files"):
        load_params(folder, model)
    index.write_text(json.dumps({"weight_map": {"x": "../one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'\.\./one\.safetensors' outside the folder"):
        load_params(folder, model)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_params(folder, model)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_load_smaller_floats_become_the_dtype_of_the_model(saved, dtype):
    model, params, folder = saved()
    _edit(folder, lambda tensors: tensors.update({n: t.astype(dtype) for n, t in tensors.items()}))

    loaded = load_params(folder, model)

    _assert_equal(loaded, jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype("f4"), params))


def test_load_untied_copy_of_a_tied_embedding_must_be_equal(saved):
    model, params, folder = saved()
    table = "model.embed_tokens.weight"
    _edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[table].copy()}))
    _assert_equal(load_params(folder, model), params)

    _edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[table] + 1}))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from the embedding"):
        check_folder(folder, model)


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(QUERY), f"'{QUERY}' is missing"),
        (lambda t: t.update(extra=np.ones(3, "f4")), "'extra' belongs to no weight of the model"),
        (
            lambda t: t.update({QUERY: t[QUERY][:-1].copy()}),
            rf"'{QUERY}' is \[31, 32\], the model has \[32, 32\]",
        ),
        (lambda t: t.update({QUERY: t[QUERY].astype("i8")}), "is I64, must be one of F32"),
    ],
)
def test_check_tensor_that_does_not_fit_is_named(saved, change, message):
    model, _, folder = saved()
    _edit(folder, change)

    with pytest.raises(CheckpointError, match=message):
        check_folder(folder, model)


def test_check_damaged_or_missing_files_are_named(saved, tmp_path):
    model, _, folder = saved()
    path = folder / "model.safetensors"
    whole = path.read_bytes()

    with pytest.raises(CheckpointError, match="holds neither model.safetensors nor"):
        check_folder(tmp_path, model)
    # Cut off; a header longer than the file; a header that claims more data than there is.
    for damaged in (whole[:-5], b"\xff" * 8 + whole[8:], whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: "):
            check_folder(folder, model)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"a": 3}}', "is damaged: 3: names of files must be texts"),
        ("[" * 100_000, "is damaged: RecursionError"),
        ('{"weight_map": {"a": ".."}}', r"names '\.\.' outside the folder"),
    ],
)
def test_check_damaged_index_is_named(saved, index, message):
    model, _, folder = saved()
    (folder / "model.safetensors.index.json").write_text(index)

    with pytest.raises(CheckpointError, match=message):
        check_folder(folder, model)


@pytest.mark.parametrize(
    ("changes", "claim", "message"),
    [
        ({"scan_layers": True}, {"n_layers": 1000}, "model.n_layers=1000 and .* has 9002"),
        (
            {"n_experts": 3, "sliding_window": 9, "tie_embeddings": False},
            {"n_experts": 10**9},
            "and model.n_experts=1000000000 has 6000000017",
        ),
    ],
)
def test_check_claims_far_beyond_the_file_are_refused_without_naming_each_tensor(
    saved, monkeypatch, changes, claim, message
):
    model, _, folder = saved(**changes)
    monkeypatch.setattr("jaxrl.models.safetensors._FEW", 1000)
    liar = build_model(dataclasses.replace(model.config, **claim))

    with pytest.raises(CheckpointError, match=message):
        check_folder(folder, liar)


def test_save_beside_an_index_that_readers_would_follow_is_refused(make_model, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")

    with pytest.raises(OutputError, match=r"holds model\.safetensors\.index\.json"):
        save_params(tmp_path, *make_model())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors.index.json"]


def test_save_that_fails_keeps_the_old_files_and_leaves_nothing(saved, monkeypatch):
    model, params, folder = saved()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr("os.replace", _disk_full)

    with pytest.raises(OutputError, match="No space left"):
        save_params(folder, model, params)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def _disk_full(*args):
    raise OSError(28, "No space left on device")


def test_save_into_a_file_is_output_error(make_model, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(OutputError, match="cannot write .*file"):
        save_params(tmp_path / "file", *make_model())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' must be one of: llama, qwen2, qwen3"),
        ({"attention_bias": True}, "attention_bias=True must be False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' must be 'silu'"),
        (
            {"rope_scaling": {"rope_type": "dynamic"}},
            "rope_type='dynamic' must be 'default', 'linear', 'llama3' or 'yarn'",
        ),
        ({"rope_scaling": {"type": "llama3"}}, "positive numbers factor, low_freq_factor"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_attention_heads": 3}, "model.n_heads=3 must be a multiple"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be a positive integer"),
        ({"hidden_size": "32"}, "hidden_size='32' must be a positive integer"),
        ({"rope_scaling": 3}, "rope_parameters=3 must be an object"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4' must be a number"),
        ({"rms_norm_eps": "small"}, "model.norm_eps"),
    ],
)
def test_published_model_that_the_decoder_cannot_compute_is_refused(saved, change, message):
    folder = saved()[2]
    record = {**json.loads((folder / "config.json").read_text()), **change}
    (folder / "config.json").write_text(json.dumps(record))

    with pytest.raises(ConfigError, match=message):
        published_model(folder)


@pytest.mark.parametrize(
    ("changes", "edit", "message"),
    [
        ({"n_experts": 4, "qk_norm": True}, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"n_experts": 4, "qk_norm": True}, {"num_experts": None}, "has no num_experts"),
        (VARIANTS["gemma2"], {"layer_types": ["chunked"]}, "must hold 'sliding_attention' and"),
        (
            {**VARIANTS["gemma2"], "n_layers": 3},
            {"layer_types": ["full_attention", *["sliding_attention"] * 2]},
            "must repeat: windows, then one 'full_attention'",
        ),
        (VARIANTS["gemma3"], {"model_type": "gemma3"}, "model_type='gemma3' must be one of"),
    ],
)
def test_published_model_with_layers_that_are_not_computed_is_refused(
    saved, changes, edit, message
):
    folder = saved(**changes)[2]
    record = {**json.loads((folder / "config.json").read_text()), **edit}
    (folder / "config.json").write_text(json.dumps(record))

    with pytest.raises(ConfigError, match=message):
        published_model(folder)


def test_save_model_of_no_family_names_what_does_not_fit(make_model, tmp_path):
    model, params = make_model(qk_norm=True, qkv_bias=True)

    with pytest.raises(
        ConfigError, match="no published family .*; qwen2 is without .*qk_norm=True"
    ):
        save_params(tmp_path / "model", model, params)

    assert not (tmp_path / "model").exists()


def test_published_model_fields_that_older_files_leave_out(tmp_path):
    record = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100,
        "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 256,
        "head_dim": None, "num_key_value_heads": None, "rope_scaling": None,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(record))

    config = published_model(tmp_path, max_length=128)

    assert config == ModelConfig(
        n_layers=2, d_model=64, n_heads=4, n_kv_heads=4, head_dim=16, mlp_dim=128,
        vocab_size=100, max_length=128, norm_eps=1e-5, rope_theta=5e5, tie_embeddings=False,
        weights=str(tmp_path),
    )  # fmt: skip


def test_published_model_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="org/name does not exist: .* nothing is downloaded"):
        published_model("org/name")
    with pytest.raises(ConfigError, match=r"config\.json"):
        published_model(tmp_path)
    for text, message in (("{", "not JSON"), ("[]", "must be a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            published_model(tmp_path)

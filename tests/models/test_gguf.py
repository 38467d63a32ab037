"""Weights out of GGUF files: the numbers of the file, checked before anything is read."""

from __future__ import annotations

import dataclasses
import importlib.util

import gguf_files
import jax
import numpy as np
import pytest

from jaxrl.config import published_model
from jaxrl.errors import CheckpointError, ConfigError
from jaxrl.models import gguf as loader
from jaxrl.models.gguf import check_gguf, load_gguf
from jaxrl.models.model import build_model, stack_layers
from jaxrl.models.safetensors import check_folder, load_params
from jaxrl.sharding import make_mesh

gguf = pytest.importorskip("gguf", reason="files are written by the package gguf")

VARIANTS = {
    "llama": {"tie_embeddings": False},
    "llama_tied": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "tie_embeddings": False},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def stored(make_model, tmp_path):
    """Function (kind, **changes) -> (model, params, path, tensors) of a file with mlp_dim 64."""

    def store(kind=lambda name: "F32", describe=lambda writer: None, **changes):
        model, params = make_model(**{"mlp_dim": 64, **changes})
        tensors = gguf_files.published_tensors(model, params)
        path = gguf_files.write_model(tmp_path / "m.gguf", model, tensors, kind, describe)
        return model, params, path, tensors

    return store


def _assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def _linear(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


@pytest.mark.parametrize("name", VARIANTS)
def test_load_float32_gives_the_config_and_the_same_bits(stored, name):
    describe = _linear if name == "linear" else lambda writer: None
    model, params, path, _ = stored(describe=describe, **VARIANTS[name])

    config = published_model(path)

    assert config == dataclasses.replace(model.config, weights=str(path))
    _assert_equal(load_params(path, build_model(config)), params)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_load_half_precision_gives_numbers_that_it_can_hold_exactly(make_model, tmp_path, kind):
    model, params = make_model()
    short = {"F16": np.float16, "BF16": jax.numpy.bfloat16}[kind]
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(short).astype(np.float32), params)
    tensors = gguf_files.published_tensors(model, params)
    path = gguf_files.write_model(tmp_path / "m.gguf", model, tensors, lambda name: kind)

    _assert_equal(load_gguf(path, model), params)


def test_load_onto_a_mesh_places_every_weight(stored):
    model, params, path, _ = stored()
    mesh = make_mesh(data=2, fsdp=2, tensor=2)

    loaded = load_gguf(path, model, mesh=mesh)

    _assert_equal(loaded, params)
    want = model.shardings(mesh)
    assert jax.tree.all(jax.tree.map(lambda x, place: x.sharding == place, loaded, want))


@pytest.mark.parametrize("mesh", [None, {"fsdp": 4, "tensor": 2}], ids=str)
def test_load_scanned_layers_stacks_them(stored, mesh):
    model, params, path, _ = stored(qkv_bias=True)
    scanned = build_model(dataclasses.replace(model.config, scan_layers=True))

    loaded = load_gguf(path, scanned, mesh=mesh and make_mesh(**mesh))

    _assert_equal(loaded, stack_layers(params))


@pytest.mark.parametrize("piece", [1, 100, 1000])
def test_load_piece_by_piece_gives_the_same(stored, monkeypatch, piece):
    model, params, path, _ = stored()
    monkeypatch.setattr(loader, "_PIECE", piece)

    _assert_equal(load_gguf(path, model), params)


def test_load_casts_to_the_type_in_which_weights_are_kept(stored):
    model, params, path, _ = stored()
    half = build_model(dataclasses.replace(model.config, param_dtype="bfloat16"))

    loaded = load_gguf(path, half)

    _assert_equal(loaded, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params))


def _spans(rows):
    """Largest magnitude and width of each block of 32, for each of its numbers."""
    blocks = rows.reshape(-1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    width = blocks.max(-1, keepdims=True) - blocks.min(-1, keepdims=True)
    return [np.broadcast_to(x, blocks.shape).reshape(rows.shape) for x in (largest, width)]


BOUNDS = {
    # Half a step of the scale; the first of the symmetric ones lacks its last positive step.
    "Q8_0": lambda largest, width: largest / 127 / 2,
    "Q4_0": lambda largest, width: largest / 8,
    "Q5_0": lambda largest, width: largest / 16,
    "Q4_1": lambda largest, width: width / 15 / 2,
    "Q5_1": lambda largest, width: width / 31 / 2,
}


@pytest.mark.parametrize("kind", BOUNDS)
def test_load_quantised_gives_what_the_package_decodes_near_the_originals(stored, kind):
    model, params, path, tensors = stored(lambda name: kind)
    number = gguf.GGMLQuantizationType[kind]
    decoded = {
        name: gguf.dequantize(gguf.quantize(value, number), number) if value.ndim > 1 else value
        for name, value in tensors.items()
    }
    again = gguf_files.write_model(path.with_name("decoded.gguf"), model, decoded)

    loaded = load_gguf(path, model)

    _assert_equal(loaded, load_gguf(again, model))
    changed = 0
    for name, value in tensors.items():
        if value.ndim > 1:
            largest, width = _spans(value)
            # Scale and offset are kept in float16.
            limit = BOUNDS[kind](largest, width) + 2.0**-10 * (largest + width)
            assert (np.abs(decoded[name] - value) <= limit).all(), name
            changed += 1
    assert changed == 15
    # The rows of queries are in their places: near the originals, not near each other's.
    near = jax.tree.map(lambda got, want: float(np.abs(got - want).max()), loaded, params)
    assert max(jax.tree.leaves(near)) < 0.5 * float(np.abs(params["embedding"]).max())


def _bits(byte, first, count):
    return (int(byte) >> first) & ((1 << count) - 1)


def _scale_and_min(scales, j):
    """The j-th 6-bit scale and minimum of 12 bytes (ggml's get_scale_min_k4)."""
    if j < 4:
        return _bits(scales[j], 0, 6), _bits(scales[j + 4], 0, 6)
    low, high = scales[j + 4], (scales[j - 4], scales[j])
    return _bits(low, 0, 4) | _bits(high[0], 6, 2) << 4, _bits(low, 4, 4) | _bits(
        high[1], 6, 2
    ) << 4


def _half(pair):
    return np.float32(np.frombuffer(bytes(pair), np.float16)[0])


def _k_block_by_hand(block, five):
    """256 numbers of a Q4_K or Q5_K block, one after the other."""
    scale, least, scales = _half(block[:2]), _half(block[2:4]), block[4:16]
    fifth, fours = (block[16:48], block[48:]) if five else (None, block[16:])
    numbers = []
    for i in range(256):
        j, within = divmod(i, 32)
        value = _bits(fours[j // 2 * 32 + within], 4 * (j % 2), 4)
        if five:
            value |= _bits(fifth[within], j, 1) << 4
        times, minus = _scale_and_min(scales, j)
        numbers.append(scale * np.float32(times) * np.float32(value) - least * np.float32(minus))
    return numbers


def _q6_block_by_hand(block):
    low, high, scales, scale = block[:128], block[128:192], block[192:208], _half(block[208:])
    numbers = []
    for i in range(256):
        part, at = divmod(i, 128)
        quarter, within = divmod(at, 32)
        four = _bits(low[64 * part + 32 * (quarter % 2) + within], 4 * (quarter // 2), 4)
        two = _bits(high[32 * part + within], 2 * quarter, 2)
        times = scale * np.float32(np.int8(scales[i // 16]))
        numbers.append(times * np.float32((four | two << 4) - 32))
    return numbers


BY_HAND = {
    "Q4_K": (144, lambda block: _k_block_by_hand(block, five=False), (0, 2)),
    "Q5_K": (176, lambda block: _k_block_by_hand(block, five=True), (0, 2)),
    "Q6_K": (210, _q6_block_by_hand, (208,)),
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_load_k_quants_gives_numbers_worked_out_by_hand(make_model, tmp_path, kind):
    size, by_hand, halves = BY_HAND[kind]
    model, params = make_model(d_model=512, n_layers=1, vocab_size=8)
    blocks = np.random.default_rng(1).integers(0, 256, (8, 2, size), dtype=np.uint8)
    for at in halves:  # scales that are no infinities
        blocks[..., at + 1] &= 0xBF
    tensors = gguf_files.published_tensors(model, params)
    tensors["token_embd.weight"] = blocks.reshape(8, -1)
    path = gguf_files.write_model(
        tmp_path / "m.gguf",
        model,
        tensors,
        lambda name: kind if name == "token_embd.weight" else "F32",
    )

    loaded = load_gguf(path, model)

    want = np.array([[by_hand(block) for block in row] for row in blocks]).reshape(8, 512)
    np.testing.assert_allclose(loaded["embedding"], want, rtol=1e-6, atol=0)


def _llama3_divisors(head_dim, theta, changes=()):
    """As the converter of llama.cpp writes them."""
    config = {**LLAMA3, **dict(changes)}
    old, low, high = (
        config[key]
        for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    divisors = []
    for i in range(0, head_dim, 2):
        length = 2 * np.pi * theta ** (i / head_dim)
        if length < old / high:
            divisors.append(1.0)
        elif length > old / low:
            divisors.append(config["factor"])
        else:
            smooth = (old / length - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / config["factor"] + smooth))
    return np.array(divisors, np.float32)


def _with_divisors(make_model, path, changes=()):
    model, params = make_model(head_dim=64, rope_theta=5e5, rope_scaling=LLAMA3)
    divisors = _llama3_divisors(64, 5e5, changes)
    assert len(set(divisors.tolist())) > 3  # fast, slow and between
    tensors = gguf_files.published_tensors(model, params) | {"rope_freqs.weight": divisors}
    return model, params, gguf_files.write_model(path, model, tensors)


def test_llama3_scaling_is_recognised_by_its_tensor(make_model, tmp_path):
    _, params, path = _with_divisors(make_model, tmp_path / "m.gguf")

    config = published_model(path)

    assert config.rope_scaling == LLAMA3
    _assert_equal(load_gguf(path, build_model(config)), params)


def test_llama3_scaling_of_other_numbers_is_refused_until_they_are_given(make_model, tmp_path):
    changes = {"original_max_position_embeddings": 4096}
    _, params, path = _with_divisors(make_model, tmp_path / "m.gguf", changes)

    with pytest.raises(CheckpointError, match=r"'rope_freqs.weight' .* set model.rope_scaling"):
        check_gguf(path, build_model(published_model(path)))
    with pytest.raises(CheckpointError, match=r"model.rope_scaling=\{\}"):
        check_gguf(path, build_model(published_model(path, rope_scaling={})))

    config = published_model(path, rope_scaling={**LLAMA3, **changes})
    _assert_equal(load_gguf(path, build_model(config)), params)


def _rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blk.1.attn_k.weight"), r"'blk.1.attn_k.weight' is missing"),
        (
            lambda t: _rename(t, "blk.0.ffn_up.weight", "blk.0.other.weight"),
            r"'blk.0.ffn_up.weight' is missing; 'blk.0.other.weight' belongs to no weight",
        ),
        (
            lambda t: t.update({"blk.0.ffn_down.weight": np.zeros((32, 96))}),
            r"'blk.0.ffn_down.weight' is \[32, 96\], the model has \[32, 64\]",
        ),
        (
            lambda t: t.update({"output.weight": t["token_embd.weight"]}),
            r"'output.weight' belongs to no weight of the model with model.tie_embeddings=True",
        ),
        (lambda t: t.clear(), r"is missing; .* and \d+ more"),
    ],
    ids=["missing", "unknown", "shape", "tied", "empty"],
)
def test_tensors_that_do_not_fit_are_refused_with_their_names(stored, change, message):
    model, _, path, tensors = stored()
    change(tensors)
    gguf_files.write_model(path, model, tensors)

    with pytest.raises(CheckpointError, match=message):
        check_folder(path, model)
    with pytest.raises(CheckpointError, match=message):
        load_gguf(path, model)


def test_type_that_is_not_supported_is_refused_with_tensor_and_type(make_model, tmp_path):
    model, params = make_model(d_model=512, n_layers=1, vocab_size=8)
    tensors = gguf_files.published_tensors(model, params)
    tensors["token_embd.weight"] = np.zeros((8, 2 * 84), np.uint8)
    path = gguf_files.write_model(
        tmp_path / "m.gguf", model, tensors, lambda name: "Q2_K" if "embd" in name else "F32"
    )

    with pytest.raises(CheckpointError, match=r"'token_embd.weight' is Q2_K, must be one of F32"):
        check_gguf(path, model)


def test_other_architecture_is_refused(stored, tmp_path):
    model, _, path, _ = stored()
    path.write_bytes(path.read_bytes().replace(b"llama", b"whale"))

    with pytest.raises(CheckpointError, match="architecture='whale' must be one of: llama"):
        check_gguf(path, model)


def test_quantised_file_without_the_package_names_the_extra(stored, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    model, params, path, tensors = stored()

    _assert_equal(load_gguf(path, model), params)  # float32 needs no package

    gguf_files.write_model(path, model, tensors, lambda name: "Q8_0")
    with pytest.raises(ConfigError, match=r"m.gguf has quantised tensors: pip install 'jaxrl\[gg"):
        check_gguf(path, model)


def test_folder_or_missing_file_is_refused(make_model, tmp_path):
    model, _ = make_model()

    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(CheckpointError, match="must be a GGUF file"):
            load_gguf(path, model)

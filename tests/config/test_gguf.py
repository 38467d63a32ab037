"""GGUF headers: what they say of a model, and what is wrong with them. No other package is used."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc

import gguf_files
import numpy as np
import pytest
from gguf_files import Entry, Raw, text, tiny

from jaxrl.config import ModelConfig, published_model
from jaxrl.config.gguf_header import is_gguf, read_header
from jaxrl.errors import CheckpointError, ConfigError

TINY = ModelConfig(
    n_layers=1, d_model=4, n_heads=2, n_kv_heads=1, head_dim=2, mlp_dim=6, vocab_size=8,
    max_length=16, norm_eps=1e-5,
)  # fmt: skip


@pytest.fixture
def write(tmp_path):
    """Function (bytes) -> path of a file with them."""

    def put(content):
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        return path

    return put


def test_published_model_gives_the_shape_with_changes_and_sets_weights(write):
    path = write(tiny())

    config = published_model(path, max_length=8, param_dtype="bfloat16")

    want = {"max_length": 8, "param_dtype": "bfloat16", "weights": str(path)}
    assert config == ModelConfig(**{**_fields(TINY), **want})


def _fields(config):
    return {name: getattr(config, name) for name in type(config).__section__.fields}


@pytest.mark.parametrize(
    ("metadata", "shapes", "field", "value"),
    [
        ({"llama.rope.freq_base": 500000.0}, {}, "rope_theta", 5e5),
        ({"llama.attention.layer_norm_rms_epsilon": 1e-6}, {}, "norm_eps", 1e-6),
        ({}, {"output.weight": (8, 4)}, "tie_embeddings", False),
        ({}, {"token_embd.weight": (24, 4)}, "vocab_size", 24),
        (
            {"llama.attention.key_length": 6, "llama.attention.value_length": 6},
            {"blk.0.attn_q.weight": (12, 4), "blk.0.attn_k.weight": (6, 4)},
            "head_dim",
            6,
        ),
        (
            {"llama.attention.head_count_kv": None},
            {"blk.0.attn_k.weight": (4, 4)},
            "n_kv_heads",
            2,
        ),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {},
            "rope_scaling",
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {"llama.rope.scale_linear": 2.0},
            {},
            "rope_scaling",
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"llama.rope.scaling.type": "none"}, {}, "rope_scaling", {}),
        ({"llama.attention.sliding_window": 16}, {}, "max_length", 16),
        ({"general.alignment": 64}, {}, "n_layers", 1),
    ],
)  # fmt: skip
def test_published_model_reads_what_files_may_say_or_leave_out(
    write, metadata, shapes, field, value
):
    config = published_model(write(tiny(metadata, shapes)))

    assert getattr(config, field) == value


def test_published_model_with_sequences_within_the_window_is_accepted(write):
    path = write(tiny({"llama.attention.sliding_window": 8}))

    assert published_model(path, max_length=8).max_length == 8


def test_published_model_of_other_families(write):
    def renamed(family):
        keys = {key.replace("llama", family): v for key, v in gguf_files.TINY.items()}
        return tiny({**dict.fromkeys(gguf_files.TINY), **keys, "general.architecture": family})

    assert published_model(write(renamed("qwen2"))).qkv_bias
    assert published_model(write(renamed("qwen3"))).qk_norm


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gpt2"}, "general.architecture='gpt2' must be one of: llama"),
        ({"general.architecture": 3}, "general.architecture=3 must be one of"),
        ({"general.architecture": None}, "general.architecture=None must be one of"),
        ({"split.count": 3}, "is one of 3 parts; merge them"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 must be 0"),
        (
            {"llama.attention.sliding_window": 8},
            "window is 8, must be at least model.max_length=16",
        ),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn', must be 'none' or"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4, must be 2"),
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base is nan, must be a positive"),
        ({"llama.rope.freq_base": -1.0}, "rope.freq_base is -1.0, must be a positive number"),
        ({"llama.rope.freq_base": "1"}, "rope.freq_base is '1', must be a positive number"),
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"llama.block_count": float("nan")}, "block_count is nan, must be a positive integer"),
        ({"llama.block_count": 0}, "block_count is 0, must be a positive integer"),
        ({"llama.block_count": True}, "block_count is True, must be a positive integer"),
        ({"llama.block_count": 2**31}, "tensors of 1 layers, but block_count is 2147483648"),
        ({"llama.block_count": [1, 1]}, "block_count is a list of 2, must be one value"),
        (
            {"llama.embedding_length": 2**31, "llama.attention.key_length": 2},
            r"'token_embd.weight' is \[8, 4\], the metadata say \[8, 2147483648\]",
        ),
        (
            {"llama.feed_forward_length": 7},
            r"'blk.0.ffn_gate.weight' is \[6, 4\], the metadata say \[7, 4\]",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "has no llama.attention.layer_norm"),
    ],
)
def test_published_model_of_what_the_decoder_cannot_compute_is_refused(write, metadata, message):
    path = write(tiny(metadata))

    with pytest.raises(ConfigError, match=message) as caught:
        published_model(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("divisors", "message"),
    [
        (np.array([np.nan], np.float32), "must hold positive numbers"),
        (np.array([0], np.float32), "must hold positive numbers"),
    ],
)
def test_published_model_of_senseless_rotary_factors_is_refused(write, divisors, message):
    content = tiny(shapes={"rope_freqs.weight": (1,)})
    path = write(content[:-32] + divisors.tobytes() + bytes(28))

    with pytest.raises(ConfigError, match=f"'rope_freqs.weight' {message}"):
        published_model(path)


def test_published_model_without_the_embedding_is_refused(write):
    path = write(tiny(shapes={"token_embd.weight": None}))

    with pytest.raises(ConfigError, match="has no tensor 'token_embd.weight'"):
        published_model(path)


_TEXT, _ARRAY, _HUGE = 8, 9, 2**62
_NESTED = Raw(_ARRAY, struct.pack("<IQIQ", _ARRAY, 1, 4, 0))

DAMAGE = {
    "magic": (tiny(magic=b"GGML"), "starts with b'GGML'"),
    "version": (tiny(version=1), "has GGUF version 1, must be 2 or 3"),
    "big-endian": (tiny(version=3 << 24), "is big-endian, must be little-endian"),
    "entry count": (tiny(more_metadata=_HUGE), "claims .* metadata entries, more than a file of"),
    "tensor count": (tiny(more_tensors=_HUGE), "claims .* tensors, more than a file of"),
    "one tensor too many": (tiny(more_tensors=1), "is cut off or damaged|dimensions|is empty"),
    "long text": (
        tiny({"a": Raw(_TEXT, struct.pack("<Q", _HUGE))}),
        f"'a' at byte .* needs {_HUGE} bytes",
    ),
    "long texts": (
        tiny({"a": Raw(_ARRAY, struct.pack("<IQ", _TEXT, _HUGE))}),
        f"claims {_HUGE} texts in 'a'",
    ),
    "long numbers": (
        tiny({"a": Raw(_ARRAY, struct.pack("<IQ", 4, _HUGE))}),
        f"claims {_HUGE} numbers in 'a'",
    ),
    "nested": (tiny({"a": _NESTED}), "has arrays within the array 'a'"),
    "unknown type": (tiny({"a": Raw(77, b"")}), "'a' has the unknown type 77"),
    "unknown type of array": (
        tiny({"a": Raw(_ARRAY, struct.pack("<IQ", 77, 1))}),
        "'a' has the unknown type 77",
    ),
    "bool": (tiny({"a": Raw(7, b"\x02")}), "'a' must be 0 or 1"),
    "text": (tiny({"a": Raw(_TEXT, text(b"\xff\xfe"))}), "'a' at byte .* must be UTF-8"),
    "key": (
        tiny(extra=text(b"\xff") + struct.pack("<II", 4, 1), more_metadata=1),
        "a metadata key at byte .* must be UTF-8",
    ),
    "duplicate key": (
        tiny(extra=text("general.architecture") + struct.pack("<II", 4, 1), more_metadata=1),
        "has the metadata key 'general.architecture' twice",
    ),
    "duplicate tensor": (
        tiny().replace(b"attn_q.weight", b"attn_k.weight"),
        "has the tensor 'blk.0.attn_k.weight' twice",
    ),
    "alignment": (tiny({"general.alignment": 24}), "general.alignment=24, must be a power of two"),
    "no alignment": (tiny({"general.alignment": 0}), "general.alignment=0, must be a power"),
    "alignment as text": (tiny({"general.alignment": "8"}), "general.alignment='8', must be"),
}
TENSORS = {
    "no dimensions": (Entry((), 0, 0), "of 0 dimensions, must be 1 to 4"),
    "many dimensions": (Entry((1,) * 5, 0, 0), "of 5 dimensions, must be 1 to 4"),
    "empty": (Entry((4, 0), 0, 0), r"of shape \[0, 4\], which is empty"),
    "overflow": (Entry((2**33, 2**33), 0, 0), f"needs {2**68} bytes, but the file ends at"),
    "outside": (Entry((4, 8), 0, 2**40), "but the file ends at byte"),
    "far outside": (Entry((4, 8), 0, 2**64 - 32), "but the file ends at byte"),
    "misaligned": (Entry((4, 8), 0, 4), "'token_embd.weight' at 4, no multiple of 32"),
    "overlap": (Entry((4, 8), 0, 128), "at byte .*, within '(token_embd|output_norm).weight'"),
    "rows of no whole block": (Entry((4, 8), 8, 0), "rows of Q8_0 must be a multiple of 32"),
}
DAMAGE |= {
    name: (tiny(entries={"token_embd.weight": entry}), message)
    for name, (entry, message) in TENSORS.items()
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_header_is_refused_with_file_and_rule_and_little_memory(write, name):
    content, message = DAMAGE[name]
    path = write(content)
    tracemalloc.start()

    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path, CheckpointError)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 1_000_000


def test_empty_file_folder_and_missing_file_are_refused(write, tmp_path):
    (tmp_path / "folder.gguf").mkdir()

    with pytest.raises(ConfigError, match=r"m.gguf must be a GGUF file; it is empty"):
        published_model(write(b""))
    with pytest.raises(ConfigError, match=r"folder.gguf must be a GGUF file; it is no file"):
        read_header(tmp_path / "folder.gguf")
    with pytest.raises(ConfigError, match=r"none.gguf must be a GGUF file; it is no file"):
        published_model(tmp_path / "none.gguf")
    assert not is_gguf(tmp_path / "folder.gguf")  # a folder may be named like that


def test_header_gives_values_of_every_type_and_shapes_outermost_first(write):
    values = {
        "u8": Raw(0, b"\xff"), "i8": Raw(1, b"\xff"), "u16": Raw(2, b"\xff\xff"),
        "i16": Raw(3, b"\xff\xff"), "i32": Raw(5, b"\xff" * 4), "u64": Raw(10, b"\xff" * 8),
        "i64": Raw(11, b"\xff" * 8), "f64": Raw(12, struct.pack("<d", 0.1)), "f32": 0.1,
        "bool": True, "text": "é", "texts": ["a", ""], "numbers": [1, -2],
        "bools": Raw(9, struct.pack("<IQ3B", 7, 3, 1, 0, 1)),
    }  # fmt: skip

    header = read_header(write(tiny(values, version=2)))

    got = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in header.metadata.items()
        if key in values
    }
    assert got == {
        "u8": 255, "i8": -1, "u16": 65535, "i16": -1, "i32": -1, "u64": 2**64 - 1, "i64": -1,
        "f64": 0.1, "f32": 0.1, "bool": True, "text": "é", "texts": ["a", ""],
        "numbers": [1, -2], "bools": [True, False, True],
    }  # fmt: skip
    tensor = header.tensors["blk.0.ffn_down.weight"]
    assert (tensor.shape, tensor.kind, tensor.nbytes) == ((4, 6), "F32", 96)
    assert tensor.start % 32 == 0


def test_reading_a_gguf_config_imports_neither_jax_nor_the_package_gguf(write):
    code = (
        "import sys; from jaxrl.config import published_model; "
        f"published_model({str(write(tiny()))!r}); print(*sys.modules)"
    )

    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()

    assert not {"jax", "flax", "gguf", "tokenizers"} & set(modules)

"""GGUF files for tests: small ones byte by byte, and models by the package that others use."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

TINY = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 16,
    "llama.embedding_length": 4,
    "llama.feed_forward_length": 6,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
TINY_SHAPES = {
    "token_embd.weight": (8, 4), "output_norm.weight": (4,), "blk.0.attn_norm.weight": (4,),
    "blk.0.ffn_norm.weight": (4,), "blk.0.attn_q.weight": (4, 4), "blk.0.attn_k.weight": (2, 4),
    "blk.0.attn_v.weight": (2, 4), "blk.0.attn_output.weight": (4, 4),
    "blk.0.ffn_gate.weight": (6, 4), "blk.0.ffn_up.weight": (6, 4),
    "blk.0.ffn_down.weight": (4, 6),
}  # fmt: skip
"""A llama of one layer: metadata, and shapes outermost first."""


class Raw:
    """A metadata value as the number of its type and its bytes."""

    def __init__(self, kind: int, payload: bytes):
        self.kind, self.payload = kind, payload


class Entry:
    """The description of a tensor as it is written: `dims` innermost first."""

    def __init__(self, dims: tuple[int, ...], kind: int, offset: int):
        self.dims, self.kind, self.offset = dims, kind, offset


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def value_bytes(value: Any) -> bytes:
    """Type and payload: int as uint32, float as float32, lists of texts or of int32."""
    if isinstance(value, Raw):
        return struct.pack("<I", value.kind) + value.payload
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def tiny(
    metadata: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...] | None] | None = None,
    entries: Mapping[str, Entry] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    more_tensors: int = 0,
    more_metadata: int = 0,
    extra: bytes = b"",
) -> bytes:
    """The tiny llama in float32, with changes. None takes a tensor or metadata key away;
    `extra` are bytes behind the metadata, for entries that no mapping can hold."""
    keys = {k: v for k, v in {**TINY, **(metadata or {})}.items() if v is not None}
    tensors = {k: v for k, v in {**TINY_SHAPES, **(shapes or {})}.items() if v is not None}
    alignment = keys.get("general.alignment", 32)
    alignment = alignment if isinstance(alignment, int) and alignment > 0 else 32
    rng = np.random.default_rng(0)
    described, data = b"", b""
    for name, shape in tensors.items():
        entry = (entries or {}).get(name) or Entry(shape[::-1], 0, len(data))
        described += text(name) + struct.pack(f"<I{len(entry.dims)}Q", len(entry.dims), *entry.dims)
        described += struct.pack("<IQ", entry.kind, entry.offset)
        data += rng.standard_normal(shape, np.float32).tobytes()
        data += bytes(-len(data) % alignment)
    counts = struct.pack("<IQQ", version, len(tensors) + more_tensors, len(keys) + more_metadata)
    head = magic + counts + b"".join(text(k) + value_bytes(v) for k, v in keys.items())
    head += extra + described
    return head + bytes(-len(head) % alignment) + data


def published_tensors(model: Any, params: Any) -> dict[str, np.ndarray]:
    """Name in the file -> tensor, made of a safetensors export with the names that the converter
    of llama.cpp gives, and its order of the rows of queries and keys."""
    import gguf
    from safetensors.numpy import load_file

    from jaxrl.models.safetensors import save_params

    with tempfile.TemporaryDirectory() as folder:
        tensors = load_file(save_params(folder, model, params))
    arch = architecture(model)
    kinds = gguf.MODEL_ARCH
    names = gguf.get_tensor_name_map(
        {"llama": kinds.LLAMA, "qwen2": kinds.QWEN2, "qwen3": kinds.QWEN3}[arch],
        model.config.n_layers,
    )
    result = {}
    for name, value in tensors.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = model.config.n_heads if "q_proj" in name else model.config.n_kv_heads
            split = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
            value = split.swapaxes(1, 2).reshape(value.shape)
        result[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    return result


def architecture(model: Any) -> str:
    return "qwen3" if model.config.qk_norm else "qwen2" if model.config.qkv_bias else "llama"


def write_model(
    path: Path,
    model: Any,
    tensors: Mapping[str, np.ndarray],
    kind: Callable[[str], str] = lambda name: "F32",
    describe: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Write `tensors` as the GGUF file of `model`; arrays of bytes are written as they are.

    `kind` gives the type of each tensor; those of one dimension stay F32 like in all such files.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture(model))
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    describe(writer)
    for name, value in tensors.items():
        number = gguf.GGMLQuantizationType["F32" if value.ndim == 1 else kind(name)]
        if value.dtype != np.uint8:
            value = gguf.quantize(np.ascontiguousarray(value, np.float32), number)
        writer.add_tensor(name, value, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

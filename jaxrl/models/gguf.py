"""Weights out of GGUF files, also quantised ones.

The file holds [outputs, inputs] like our weights. One weight is on the host at a time (with
`scan_layers`: one weight of all layers), decoded piece by piece into the type that it is kept in.
"""

from __future__ import annotations

import importlib.util
import io
import operator
import os
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.config.gguf import ROPE_FACTORS, rope_factors
from jaxrl.config.gguf_header import BLOCKS, GgufHeader, GgufTensor, read_header
from jaxrl.config.published import family_of
from jaxrl.errors import CheckpointError, ConfigError
from jaxrl.models.layout import path_of, stored_shape
from jaxrl.models.model import Model, Params
from jaxrl.models.rope import frequency_factors
from jaxrl.sharding import DEFAULT_RULES, Rules

_UNTIED = "output.weight"
_OUTSIDE = {
    "embedding": "token_embd.weight",
    "unembedding": _UNTIED,
    "final_norm/scale": "output_norm.weight",
}
_LAYER = {
    "attention_norm/scale": "blk.{i}.attn_norm.weight",
    "mlp_norm/scale": "blk.{i}.ffn_norm.weight",
    "attention/query": "blk.{i}.attn_q.weight",
    "attention/key": "blk.{i}.attn_k.weight",
    "attention/value": "blk.{i}.attn_v.weight",
    "attention/query_bias": "blk.{i}.attn_q.bias",
    "attention/key_bias": "blk.{i}.attn_k.bias",
    "attention/value_bias": "blk.{i}.attn_v.bias",
    "attention/out": "blk.{i}.attn_output.weight",
    "attention/query_norm/scale": "blk.{i}.attn_q_norm.weight",
    "attention/key_norm/scale": "blk.{i}.attn_k_norm.weight",
    "mlp/gate": "blk.{i}.ffn_gate.weight",
    "mlp/up": "blk.{i}.ffn_up.weight",
    "mlp/down": "blk.{i}.ffn_down.weight",
}
"""Path of a weight within a layer -> its name in the file."""

_ROTATED = ("attention/query", "attention/key", "attention/query_bias", "attention/key_bias")
_INTERLEAVED = {"llama": _ROTATED, "qwen2": (), "qwen3": ()}
"""Architecture -> weights within a layer whose heads hold the pairs of the rotation side by side
(0, H/2, 1, H/2 + 1, …) instead of half by half."""

_PLAIN = ("F32", "F16", "BF16")
_PIECE = 1 << 18  # numbers that are decoded at once


def check_gguf(path: str | os.PathLike[str], model: Model) -> None:
    """Raise `CheckpointError` unless the GGUF file `path` holds the weights of the model.

    Reads the header alone. `ConfigError` where the package for quantised tensors is not installed.
    """
    _checked(path, model)


def load_gguf(
    path: str | os.PathLike[str],
    model: Model,
    *,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Params:
    """The weights in the GGUF file `path`, in `param_dtype`, on `mesh` (None: the first device).

    Raises `CheckpointError`, before any weight is read, for a damaged file and for tensors that
    are missing, unknown, of another shape or of a type that is not supported, naming each.
    `ConfigError` where the package for quantised tensors is not installed.
    """
    header = _checked(path, model)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = jax.tree.map(lambda _: one, model.abstract)
    if mesh is not None:
        places = model.shardings(mesh, rules)
    try:
        with header.path.open("rb") as file:

            def load(keys: tuple, like: jax.ShapeDtypeStruct, place: Any) -> jax.Array:
                whole = _read(file, header, keys, like, model)
                take = partial(operator.getitem, whole)
                # Waiting keeps it at one weight: transfers may run behind the reading.
                return jax.block_until_ready(jax.make_array_from_callback(like.shape, place, take))

            return jax.tree_util.tree_map_with_path(load, model.abstract, places)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def _checked(path: str | os.PathLike[str], model: Model) -> GgufHeader:
    """The header of the file, once it is known to hold the model and nothing else."""
    header = read_header(path, CheckpointError)
    family = header.metadata.get("general.architecture")
    if not isinstance(family, str) or family not in _INTERLEAVED:
        known = ", ".join(_INTERLEAVED)
        raise CheckpointError(f"{path}: general.architecture={family!r} must be one of: {known}")
    if (wanted := family_of(model.config).model_type) != family:
        raise CheckpointError(f"{path} holds a {family}, the model is a {wanted}")
    problems = _problems(header, model)
    if problems:
        more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
        raise CheckpointError(f"{path} does not fit: {'; '.join(problems[:5] + more)}")
    if ROPE_FACTORS in header.tensors:
        _check_rope(header, model)
    if any(tensor.kind not in _PLAIN for tensor in header.tensors.values()):
        _demand_package(path)
    return header


def _problems(header: GgufHeader, model: Model) -> list[str]:
    """What is wrong with the tensors, in words."""
    wanted: dict[str, tuple[int, ...]] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(model.abstract):
        path, names, stacked = _names(keys, model)
        shape = leaf.shape[1:] if stacked else leaf.shape
        wanted |= dict.fromkeys(names, stored_shape(path, shape))
    problems = [f"{name!r} is missing" for name in wanted if name not in header.tensors]
    for name, tensor in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        if name not in wanted:
            tied = name == _UNTIED and model.config.tie_embeddings
            why = " with model.tie_embeddings=True" if tied else ""
            problems.append(f"{name!r} belongs to no weight of the model{why}")
            continue
        if tensor.shape != wanted[name]:
            found = list(tensor.shape)
            problems.append(f"{name!r} is {found}, the model has {list(wanted[name])}")
        if tensor.kind not in BLOCKS:
            problems.append(f"{name!r} is {tensor.kind}, must be one of {', '.join(BLOCKS)}")
    return problems


def _check_rope(header: GgufHeader, model: Model) -> None:
    """The divisors of the file's rotary frequencies must be those of `model.rope_scaling`."""
    config = model.config
    try:
        found = rope_factors(header)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    ours = np.ones(config.head_dim // 2, np.float32)
    if config.rope_scaling:
        ours = frequency_factors(config.head_dim, config.rope_theta, config.rope_scaling)
    # The file divides by its numbers what we multiply by ours.
    if found.shape != ours.shape or not np.allclose(found * ours, 1, rtol=1e-4, atol=0):
        raise CheckpointError(
            f"{header.path}: {ROPE_FACTORS!r} holds other factors than "
            f"model.rope_scaling={config.rope_scaling!r} and model.rope_theta={config.rope_theta} "
            "give; set model.rope_scaling to that of the model's config.json"
        )


def _demand_package(path: str | os.PathLike[str]) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{path} has quantised tensors: pip install 'jaxrl[gguf]'")


def _names(keys: tuple, model: Model) -> tuple[str, list[str], bool]:
    """Path of a weight (within its layer, if it has one); its names in the file: one, or one for
    each layer when they are scanned; and whether it is that of all layers."""
    path, layers = path_of(keys, model.config)
    if layers is None:
        return path, [_OUTSIDE[path]], False
    return path, [_LAYER[path].format(i=i) for i in layers], model.config.scan_layers


def _read(
    file: io.BufferedReader,
    header: GgufHeader,
    keys: tuple,
    like: jax.ShapeDtypeStruct,
    model: Model,
) -> np.ndarray:
    """The whole weight at `keys`, in its shape and type."""
    path, names, stacked = _names(keys, model)
    whole = np.empty(like.shape, like.dtype)
    for i, name in enumerate(names):
        tensor = header.tensors[name]
        target: Any = slice(None)
        if path in _INTERLEAVED[header.metadata["general.architecture"]]:
            target = _half_by_half(tensor.shape[0], model.config.head_dim)
        part = whole[i] if stacked else whole
        _fill(part.reshape(tensor.shape), file, tensor, target)
    return whole


def _half_by_half(rows: int, head_dim: int) -> np.ndarray:
    """Where each row of the file belongs: (head, pair, half) there is (head, half, pair) here."""
    ours = np.arange(rows).reshape(-1, 2, head_dim // 2)
    return ours.swapaxes(1, 2).reshape(rows)


def _fill(out: np.ndarray, file: io.BufferedReader, tensor: GgufTensor, target: Any) -> None:
    """Row i of the tensor becomes row target[i] of `out` [rows, columns], or [rows]."""
    rows = np.arange(tensor.shape[0])[target]
    if out.ndim == 1:
        out[rows] = _decoded(file, tensor, tensor.start, tensor.nbytes)
        return
    width = tensor.nbytes // len(rows)
    step = max(1, _PIECE // out.shape[1])
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        values = _decoded(file, tensor, tensor.start + first * width, len(some) * width)
        out[some] = values.reshape(len(some), -1)


def _decoded(file: io.BufferedReader, tensor: GgufTensor, start: int, nbytes: int) -> np.ndarray:
    """The numbers that `nbytes` bytes at byte `start` of the file stand for, in one dimension."""
    raw = np.empty(nbytes, np.uint8)
    file.seek(start)
    if file.readinto(memoryview(raw)) != nbytes:
        raise CheckpointError(f"{file.name}: {tensor.name!r} is cut off")
    if tensor.kind == "F32":
        return raw.view("<f4")
    if tensor.kind == "F16":
        return raw.view("<f2")
    if tensor.kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    import gguf

    # A damaged scale may be an infinity; it is the weight's own, not a fault of the decoding.
    with np.errstate(all="ignore"):
        # As one row: the package would go through many short ones in Python.
        return gguf.dequantize(raw[None], gguf.GGMLQuantizationType[tensor.kind])[0]

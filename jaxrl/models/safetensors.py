"""Weights in and out of folders as Hugging Face keeps them: safetensors, one file or several.

Weights are stored outputs first there as here, so every tensor is a reshape of one of ours, or of a
slice of one where we stack layers or experts. They are read one by one straight to their place on
the mesh; the whole model is never on the host.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.config.gguf_header import is_gguf
from jaxrl.config.published import family_of, published_record
from jaxrl.errors import CheckpointError, OutputError
from jaxrl.models.gguf import check_gguf, load_gguf
from jaxrl.models.layout import path_of, stored_shape
from jaxrl.models.lora import merge_adapters
from jaxrl.models.model import Model, Params
from jaxrl.sharding import DEFAULT_RULES, Rules

if TYPE_CHECKING:
    from jaxrl.config import ModelConfig

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F32", "F16", "BF16")
_FEW = 10_000
"""Tensors whose names may be missing one by one."""

_UNTIED = "lm_head.weight"
_OUTSIDE = {
    "embedding": "model.embed_tokens.weight",
    "unembedding": _UNTIED,
    "final_norm/scale": "model.norm.weight",
}
"""Path of a weight outside of the layers -> its published name."""


def check_folder(folder: str | os.PathLike[str], model: Model) -> None:
    """Raise `CheckpointError` unless the tensors in `folder` are the model's; reads headers.

    `folder` may also be a GGUF file.
    """
    if is_gguf(folder):
        return check_gguf(folder, model)
    with _Tensors(Path(folder)) as tensors:
        tensors.check(model)


def load_params(
    folder: str | os.PathLike[str],
    model: Model,
    *,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Params:
    """The weights in `folder`, in the model's `param_dtype`, on `mesh` (None: the first device).

    Raises `CheckpointError`, before any weight is read, for a file that is missing or damaged and
    for tensors that are missing, unknown, in two files, or of another shape, naming each.
    `folder` may also be a GGUF file.
    """
    if is_gguf(folder):
        return load_gguf(folder, model, mesh=mesh, rules=rules)
    with _Tensors(Path(folder)) as tensors:
        tensors.check(model)
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        places = jax.tree.map(lambda _: one, model.abstract)
        if mesh is not None:
            places = model.shardings(mesh, rules)

        name_of = _Names(model.config)

        def load(path: tuple, like: jax.ShapeDtypeStruct, place: Any) -> jax.Array:
            part = functools.partial(_part, tensors.read, name_of(path), like)
            return jax.make_array_from_callback(like.shape, place, part)

        return jax.tree_util.tree_map_with_path(load, model.abstract, places)


def save_params(folder: str | os.PathLike[str], model: Model, params: Params) -> Path:
    """Write config.json and model.safetensors for other libraries; returns the weights' path.

    Adapters are merged into the weights that they change. The model is gathered on the host.
    Readers see the old file or the new one, never half of one.
    Raises `OutputError`.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    model, params = merge_adapters(model, params)
    tensors: dict[str, np.ndarray] = {}
    name_of = _Names(model.config)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        whole, shape = np.asarray(leaf), name_of.shape(path, leaf.shape)
        for index, name in np.ndenumerate(name_of(path)):
            tensors[name] = np.ascontiguousarray(whole[index].reshape(shape))
    record = json.dumps(published_record(model.config), indent=2) + "\n"
    if os.path.lexists(folder / _INDEX):
        rule = f"readers would take the files that it names, not {_SINGLE}"
        raise OutputError(f"{folder} holds {_INDEX}: {rule}; choose another folder")
    # Names of this process: two that write the same folder must not write into one file.
    half_written = folder / f"{_SINGLE}.{os.getpid()}.unfinished"
    half_config = folder / f"config.json.{os.getpid()}.unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, half_written, metadata={"format": "pt"})
        half_written.chmod(0o644)  # the library writes for the owner alone
        half_config.write_text(record, encoding="utf-8")
        os.replace(half_written, folder / _SINGLE)
        os.replace(half_config, folder / "config.json")
    except Exception as error:
        # The library reports the system's refusals as errors of its own.
        raise OutputError(f"cannot write {folder / _SINGLE}: {error}") from error
    finally:
        for path in (half_written, half_config):
            with contextlib.suppress(OSError):
                path.unlink()
    return folder / _SINGLE


class _Tensors:
    """The tensors of a folder by name, whichever file they are in."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> _Tensors:
        with contextlib.ExitStack() as stack:
            for path in _files_of(self._folder):
                file = stack.enter_context(_open(path))
                for name in file.keys():  # noqa: SIM118  # not a mapping
                    if name in self._files:
                        raise CheckpointError(f"{self._folder}: {name!r} is in two files")
                    self._files[name] = file
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def check(self, model: Model) -> None:
        """Every tensor of the model is there, in its shape, and no other."""
        wanted: dict[str, tuple[int, ...]] = {}
        name_of = _Names(model.config)
        self._check_counts(model, name_of)
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.abstract):
            wanted |= dict.fromkeys(name_of(path).flat, name_of.shape(path, leaf.shape))
        problems = [f"{name!r} is missing" for name in wanted if name not in self._files]
        for name in self._files:
            if name not in wanted:
                if not (name == _UNTIED and model.config.tie_embeddings):
                    problems.append(f"{name!r} belongs to no weight of the model")
                continue
            header = self._files[name].get_slice(name)
            shape, dtype = tuple(header.get_shape()), header.get_dtype()
            if shape != wanted[name]:
                problems.append(f"{name!r} is {list(shape)}, the model has {list(wanted[name])}")
            if dtype not in _FLOATS:
                problems.append(f"{name!r} is {dtype}, must be one of {', '.join(_FLOATS)}")
        if problems:
            more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
            raise CheckpointError(f"{self._folder} does not fit: {'; '.join(problems[:5] + more)}")
        if model.config.tie_embeddings and _UNTIED in self._files:
            table = self.read(_OUTSIDE["embedding"])
            if not np.array_equal(table, self.read(_UNTIED)):
                raise CheckpointError(
                    f"{self._folder}: {_UNTIED!r} differs from the embedding, but "
                    "model.tie_embeddings=True"
                )

    def _check_counts(self, model: Model, name_of: _Names) -> None:
        """Layers and experts that are not there must not be named one by one: a damaged
        config.json may claim a thousand million of them."""
        leaves = jax.tree_util.tree_leaves_with_path(model.abstract)
        count = sum(name_of.count(path) for path, _ in leaves)
        if count > 2 * len(self._files) + _FEW:
            config = model.config
            raise CheckpointError(
                f"{self._folder} does not fit: it holds {len(self._files)} tensors, a model of "
                f"model.n_layers={config.n_layers} and model.n_experts={config.n_experts} "
                f"has {count}"
            )

    def read(self, name: str) -> np.ndarray:
        """The tensor as it is stored."""
        return self._files[name].get_tensor(name)


def _part(
    read: Callable[[str], np.ndarray],
    names: np.ndarray,
    like: jax.ShapeDtypeStruct,
    index: tuple[slice, ...],
) -> np.ndarray:
    """The part `index` of a weight; one tensor is in memory at a time."""
    lead = names.ndim
    wanted = names[index[:lead]] if lead else names
    part: np.ndarray | None = None
    for i, name in enumerate(wanted.flat):
        tensor = read(name).reshape(like.shape[lead:])[index[lead:]]
        if not lead:
            return tensor.astype(like.dtype, copy=False)
        if part is None:
            part = np.empty((wanted.size, *tensor.shape), like.dtype)
        part[i] = tensor
    return part.reshape(*wanted.shape, *part.shape[1:])


class _Names:
    """Path of a weight -> the names of its tensors.

    An array of rank 0; with an axis for layers when they are scanned, then one for experts.
    """

    def __init__(self, config: ModelConfig):
        self._config = config
        self._tensors = family_of(config).tensors

    def __call__(self, keys: tuple) -> np.ndarray:
        template, layers, experts = self._spelt(keys)
        if layers is None:
            return np.array(template, object)
        config = self._config
        names = [
            [f"model.layers.{layer}." + template.format(expert=expert) for expert in range(experts)]
            for layer in layers
        ]
        shape = [len(layers)] if config.scan_layers else []
        shape += [experts] if "{expert}" in template else []
        return np.array(names, object).reshape(shape)

    def count(self, keys: tuple) -> int:
        """How many tensors the weight at `keys` is, without naming them."""
        _, layers, experts = self._spelt(keys)
        return experts * (1 if layers is None else len(layers))

    def shape(self, keys: tuple, shape: tuple[int, ...]) -> tuple[int, ...]:
        """That of each of its tensors, where `shape` is that of the weight."""
        path, _ = path_of(keys, self._config)
        return stored_shape(path, shape[self(keys).ndim :])

    def _spelt(self, keys: tuple) -> tuple[str, range | None, int]:
        """The published name, within a layer if it is in one; its layers; its experts, or 1."""
        path, layers = path_of(keys, self._config)
        template = _OUTSIDE[path] if layers is None else self._tensors[path]
        return template, layers, self._config.n_experts if "{expert}" in template else 1


def _files_of(folder: Path) -> list[Path]:
    """The files that hold the tensors: those of the index, or the single one."""
    if (folder / _INDEX).is_file():
        try:
            record = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            names = sorted(set(record["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{folder / _INDEX} is damaged: {error!r}") from None
        if wrong := [name for name in names if not isinstance(name, str)]:
            rule = "names of files must be texts"
            raise CheckpointError(f"{folder / _INDEX} is damaged: {wrong[0]!r}: {rule}")
        # A name is a file of this folder: an index must not reach outside it.
        if outside := [name for name in names if name == ".." or Path(name).name != name]:
            raise CheckpointError(f"{folder / _INDEX} names {outside[0]!r} outside the folder")
        return [folder / name for name in names]
    if not (folder / _SINGLE).is_file():
        raise CheckpointError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
    return [folder / _SINGLE]


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, "numpy")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    with file:
        yield file

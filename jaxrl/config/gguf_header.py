"""The header of a GGUF file: its metadata, and where every tensor lies. No tensor is read.

The file may be damaged or hostile: each count, length and offset is held against the bytes that
the file has before it is used, so that time and memory are bounded by the size of the header.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxrl.errors import ConfigError, JaxrlError

BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Type of a tensor that jaxrl reads -> (numbers, bytes) of one block of it."""

_KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIifBQqd", strict=True))
_FLOAT, _BOOL, _TEXT, _ARRAY = 6, 7, 8, 9
_LEAST_ENTRY = 13  # bytes of the shortest metadata entry: length of the key, type, one byte
_LEAST_TENSOR = 32  # bytes of the shortest description of a tensor
_MAX_DIMS = 4


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """`shape` is ours, outermost dimension first; `kind` a key of `BLOCKS` or another type's name.

    The data are the `nbytes` bytes at byte `start` of the file; 0 for types not in `BLOCKS`.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Metadata (key -> number, bool, text, list of text or numpy array) and tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is meant as a GGUF file: its name ends in .gguf, and it is no folder."""
    path = Path(path)
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def read_header(path: str | os.PathLike[str], error: type[JaxrlError] = ConfigError) -> GgufHeader:
    """The header of the GGUF file `path`, version 2 or 3, little-endian.

    Raises `error`, naming file and rule, for whatever is not such a file: it is missing, cut off,
    claims more than it holds, repeats a name, or has tensors that overlap or lie outside it.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise error(f"{path} must be a GGUF file; it is no file")
        if not path.stat().st_size:
            raise error(f"{path} must be a GGUF file; it is empty")
        with path.open("rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data, error).header()
    except (OSError, ValueError) as problem:
        if isinstance(problem, JaxrlError):
            raise
        raise error(f"cannot read {path}: {problem}") from None


class _Parser:
    """Reads from `at` onwards, never beyond the end."""

    def __init__(self, path: Path, data: mmap.mmap, error: type[JaxrlError]):
        self._path, self._data, self._error = path, data, error
        self._at, self._size = 0, len(data)

    def header(self) -> GgufHeader:
        """The whole header, checked."""
        start = self._take(4, "the magic number")
        if (magic := self._data[start : self._at]) != b"GGUF":
            self._fail(f"starts with {magic!r}, a GGUF file with b'GGUF'")
        version = self._scalar("I", "the version")
        if version not in (2, 3):
            swapped = version in (2 << 24, 3 << 24)
            self._fail(
                "is big-endian, must be little-endian"
                if swapped
                else f"has GGUF version {version}, must be 2 or 3"
            )
        n_tensors, n_entries = (self._scalar("Q", "a count") for _ in range(2))
        self._demand_room(n_entries, _LEAST_ENTRY, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(n_entries):
            key = self._text("a metadata key")
            if key in metadata:
                self._fail(f"has the metadata key {key!r} twice")
            metadata[key] = self._value(repr(key))
        self._demand_room(n_tensors, _LEAST_TENSOR, "tensors")
        tensors: dict[str, GgufTensor] = {}
        for _ in range(n_tensors):
            tensor = self._tensor()
            if tensor.name in tensors:
                self._fail(f"has the tensor {tensor.name!r} twice")
            tensors[tensor.name] = tensor
        return GgufHeader(self._path, metadata, self._placed(tensors, metadata))

    def _fail(self, rule: str) -> NoReturn:
        raise self._error(f"{self._path} {rule}")

    def _take(self, size: int, what: str) -> int:
        """Where the next `size` bytes start; they are then behind us."""
        start = self._at
        if size > self._size - start:
            self._fail(
                f"is cut off or damaged: {what} at byte {start} needs {size} bytes, "
                f"but the file ends at byte {self._size}"
            )
        self._at = start + size
        return start

    def _demand_room(self, count: int, least: int, what: str) -> None:
        if count > (self._size - self._at) // least:
            self._fail(f"claims {count} {what}, more than a file of {self._size} bytes can hold")

    def _scalar(self, code: str, what: str) -> Any:
        return struct.unpack_from(
            f"<{code}", self._data, self._take(struct.calcsize(f"<{code}"), what)
        )[0]

    def _text(self, what: str) -> str:
        length = self._scalar("Q", what)
        start = self._take(length, what)
        try:
            return self._data[start : self._at].decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"is damaged: {what} at byte {start} must be UTF-8 text")

    def _value(self, key: str) -> Any:
        """One metadata value; `key` is quoted already, like the others of this class."""
        kind = self._scalar("I", key)
        if kind == _TEXT:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        value = self._scalar(self._code(kind, key), key)
        if kind == _BOOL:
            return bool(self._flags(np.array([value]), key)[0])
        # The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT else value

    def _array(self, key: str) -> list[str] | np.ndarray:
        kind, count = self._scalar("I", key), self._scalar("Q", key)
        if kind == _ARRAY:
            self._fail(f"has arrays within the array {key}, which is not supported")
        if kind == _TEXT:
            self._demand_room(count, 8, f"texts in {key}")
            return [self._text(key) for _ in range(count)]
        dtype = np.dtype(f"<{self._code(kind, key)}" if kind != _BOOL else "u1")
        self._demand_room(count, dtype.itemsize, f"numbers in {key}")
        start = self._take(count * dtype.itemsize, key)
        values = np.frombuffer(self._data[start : self._at], dtype)
        return self._flags(values, key) if kind == _BOOL else values

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            self._fail(f"is damaged: {key} has the unknown type {kind}")
        return _SCALARS[kind]

    def _flags(self, values: np.ndarray, key: str) -> np.ndarray:
        if (values > 1).any():
            self._fail(f"is damaged: {key} must be 0 or 1")
        return values.astype(bool)

    def _tensor(self) -> GgufTensor:
        """One description; `start` still counts from where the data begin."""
        name = self._text("the name of a tensor")
        what = repr(name)
        n_dims = self._scalar("I", what)
        if not 1 <= n_dims <= _MAX_DIMS:
            self._fail(f"has the tensor {name!r} of {n_dims} dimensions, must be 1 to {_MAX_DIMS}")
        shape = tuple(self._scalar("Q", what) for _ in range(n_dims))[::-1]
        if 0 in shape:
            self._fail(f"has the tensor {name!r} of shape {list(shape)}, which is empty")
        number = self._scalar("I", what)
        kind = _KINDS.get(number, f"type {number}")
        start, nbytes = self._scalar("Q", what), 0
        if kind in BLOCKS:
            block, size = BLOCKS[kind]
            if shape[-1] % block:
                self._fail(
                    f"has the tensor {name!r} of shape {list(shape)}: rows of {kind} must be a "
                    f"multiple of {block}"
                )
            nbytes = math.prod(shape) // block * size
        return GgufTensor(name, shape, kind, start, nbytes)

    def _placed(
        self, tensors: Mapping[str, GgufTensor], metadata: Mapping[str, Any]
    ) -> dict[str, GgufTensor]:
        """The tensors with their place in the file, once that is known to be a good one."""
        alignment = metadata.get("general.alignment", 32)
        # The highest alignment is that of huge pages; a power of two has a single bit.
        if type(alignment) is not int or not 0 < alignment <= 2**21 or alignment.bit_count() != 1:
            self._fail(f"has general.alignment={alignment!r}, must be a power of two")
        first = -(-self._at // alignment) * alignment
        end, before = first, "the header"
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            start = first + tensor.start
            if tensor.start % alignment:
                self._fail(f"has {tensor.name!r} at {tensor.start}, no multiple of {alignment}")
            if start < end:
                self._fail(f"has {tensor.name!r} at byte {start}, within {before!r}")
            if start + tensor.nbytes > self._size:
                self._fail(
                    f"is cut off or damaged: {tensor.name!r} {list(tensor.shape)} at byte {start} "
                    f"needs {tensor.nbytes} bytes, but the file ends at byte {self._size}"
                )
            end, before = start + tensor.nbytes, tensor.name
        return {
            name: dataclasses.replace(tensor, start=first + tensor.start)
            for name, tensor in tensors.items()
        }

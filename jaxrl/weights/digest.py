"""A digest of weights that does not depend on how they are laid out on devices.

Each element is hashed together with its position in the whole array; the hashes are added up as
integers. A sum of integers is the same in any order, so each device adds up what it holds and
nothing is gathered. Four such sums of 32 bits ("lanes", 128 bits in all) describe a leaf; SHA-256
over the names, shapes, dtypes and lanes of all leaves gives the digest. It tells apart weights that
differ by accident, in a single bit or in their order. It is no protection against somebody who
constructs a collision on purpose.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.errors import WeightVersionError
from jaxrl.sharding.placement import path_name
from jaxrl.types import WeightVersion

_LANES = 4
_FORMAT = (
    "jaxrl digest 1"  # part of the digest: another way of computing it must give other digests
)


def compute_digest(params: Any) -> str:
    """64 hexadecimal digits that identify the exact bits of every leaf under its name.

    `params` is a tree of jax or numpy arrays on one set of devices, in any layout. Nothing but one
    small result leaves the devices; this waits for it. -0.0 and 0.0, and NaNs
    with different payloads, count as different. Raises `ValueError` for leaves that have no plain
    bits (complex numbers, sub-byte types, random keys), for dtypes that jax would convert on the
    way, for two leaves of one name, and for a dimension of 2^32 elements or more.
    """
    named = named_leaves(params)
    for name, leaf in named.items():
        _check_leaf(name, leaf)
    names, leaves = tuple(named), list(named.values())
    mesh, specs = _layout(leaves)
    lanes = np.asarray(_program(names, mesh, specs)(leaves))
    sha = hashlib.sha256(_FORMAT.encode())
    for i in sorted(range(len(names)), key=names.__getitem__):
        record = [names[i], list(leaves[i].shape), str(leaves[i].dtype), lanes[i].tolist()]
        sha.update(json.dumps(record).encode() + b"\n")
    return sha.hexdigest()


def stamp(params: Any, number: int) -> WeightVersion:
    """The version `number` of these weights, with their digest."""
    return WeightVersion(number, compute_digest(params))


def verify(params: Any, version: WeightVersion, *, source: str = "weights") -> None:
    """Raise `WeightVersionError` unless `params` are, bit for bit, what `version` says.

    `source` says in the message where the weights came from.
    """
    digest = compute_digest(params)
    if digest != version.digest:
        raise WeightVersionError(
            f"{source}: version {version.number} must have digest {version.digest}, "
            f"but these weights have {digest}"
        )


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their "/"-joined path. Raises `ValueError` where two leaves would share a name."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = path_name(path)
        if name in named:
            raise ValueError(f"two leaves are named {name!r}: keys must not contain '/'")
        named[name] = leaf
    return named


def _check_leaf(name: str, leaf: Any) -> None:
    """The rules for one leaf; see `compute_digest`."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise ValueError(f"{name!r} is a {type(leaf).__name__}, not an array")
    dtype = leaf.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype.kind == "c":
        raise ValueError(f"{name!r}: dtype {dtype} has no plain bits to digest")
    if "int4" in dtype.name or "int2" in dtype.name or "float4" in dtype.name:
        raise ValueError(f"{name!r}: dtype {dtype} is narrower than a byte, which has no digest")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"{name!r}: jax would convert {dtype}; convert it first, or enable x64")
    if any(size >= 2**32 for size in leaf.shape):
        raise ValueError(f"{name!r}: shape {leaf.shape} has a dimension of 2^32 elements or more")


def _layout(leaves: Sequence[Any]) -> tuple[Mesh | None, tuple[PartitionSpec, ...]]:
    """The one mesh that the leaves are spread over, and their specs; (None, ()) without one."""
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    spread = [s for s in shardings if s is not None and len(s.device_set) > 1]
    if len(meshes) != 1 or not spread or not all(isinstance(s, NamedSharding) for s in spread):
        return None, ()  # still right, only slower: the compiler finds its own way to add up
    specs = (s.spec if isinstance(s, NamedSharding) else PartitionSpec() for s in shardings)
    return meshes.pop(), tuple(specs)


@functools.lru_cache(maxsize=32)
def _program(
    names: tuple[str, ...], mesh: Mesh | None, specs: tuple[PartitionSpec, ...]
) -> Callable[[list], jax.Array]:
    """Function: list of leaves -> lanes uint32 [leaves, 4]; kept, to compile once per layout."""
    salts = [_constants(f"leaf {name}") for name in names]

    def one_by_one(leaves: list[jax.Array]) -> jax.Array:
        # A program for each shape, not one for all leaves: those of a deep model take half a minute
        # to compile together, and nothing is gained, as there is nothing to send.
        if not leaves:
            return jnp.zeros((0, _LANES), jnp.uint32)
        pairs = zip(leaves, salts, strict=True)
        return _stack([_lanes_of_whole(x, np.array(salt, np.uint32)) for x, salt in pairs])

    if mesh is None:
        return one_by_one

    def local(leaves: list[jax.Array]) -> jax.Array:
        lanes = []
        for x, salt, spec in zip(leaves, salts, specs, strict=True):
            split = [_axes(spec[d]) if d < len(spec) else () for d in range(x.ndim)]
            copies = tuple(a for a in mesh.axis_names if not any(a in axes for axes in split))
            sums = _lanes(x, salt, [_offset(x.shape[d], axes) for d, axes in enumerate(split)])
            # Devices that hold copies of the same shard must not count it several times.
            lanes.append(jnp.where(jax.lax.axis_index(copies) == 0, sums, 0) if copies else sums)
        return jax.lax.psum(jnp.stack(lanes), mesh.axis_names)

    # One all-reduce for everything; left to itself the compiler makes one or more for each leaf.
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec())
    )


def _lanes(x: jax.Array, salt: Sequence[Any], offsets: Sequence[Any] | None = None) -> jax.Array:
    """x [...] (a shard that starts at `offsets`) -> the four sums, uint32 [4]."""
    bits = _bits(x)
    if offsets is not None:
        offsets = [*offsets, *[0] * (bits.ndim - len(offsets))]
    keys = [jnp.uint32(lane) for lane in salt]
    for dim in range(bits.ndim):
        # Per dimension rather than a flat index: shards need no reshape, and nothing overflows.
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        index = index if offsets is None else index + jnp.uint32(offsets[dim])
        steps = _constants(f"dimension {dim}")
        keys = [key + index * jnp.uint32(step | 1) for key, step in zip(keys, steps, strict=True)]
    hashes = tuple(_mix(bits ^ key) for key in keys)
    # One reduction over four operands reads the array once (and is 10 times faster on CPU).
    zeros = (jnp.uint32(0),) * _LANES
    sums = jax.lax.reduce(hashes, zeros, _add, tuple(range(bits.ndim)))
    return jnp.stack(sums)


_lanes_of_whole = jax.jit(lambda x, salt: _lanes(x, salt))
_stack = jax.jit(jnp.stack)


def _add(left: tuple, right: tuple) -> tuple:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _mix(x: jax.Array) -> jax.Array:
    """A permutation of uint32 in which each bit of the input moves about half of the output's bits.

    Multiply and xor-shift, with the constants of Wellons's "lowbias32".
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _bits(x: jax.Array) -> jax.Array:
    """The bit patterns as uint32; 64-bit elements get a last dimension of two words."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = min(x.dtype.itemsize * 8, 32)
    return jax.lax.bitcast_convert_type(x, f"uint{width}").astype(jnp.uint32)


def _constants(text: str) -> tuple[int, ...]:
    """Four fixed 32-bit numbers that look random, one for each lane."""
    words = np.frombuffer(hashlib.sha256(f"{_FORMAT}: {text}".encode()).digest(), "<u4")
    return tuple(int(word) for word in words[:_LANES])


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one dimension of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _offset(local_size: int, axes: tuple[str, ...]) -> jax.Array | int:
    """Where this device's shard starts in a dimension that is split over `axes`."""
    return jax.lax.axis_index(axes).astype(jnp.uint32) * local_size if axes else 0

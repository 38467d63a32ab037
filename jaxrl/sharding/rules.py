"""Rules that map logical axis names of arrays to axes of a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None
LogicalAxes = Sequence[str | None]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis name -> mesh axis, several mesh axes (the first is the major one), or None.

    None means that the dimension is not split. Rules do not change and can be hashed, so that they
    may be a static argument of a jitted function. Raises `ValueError` for a malformed rule.
    """

    mapping: Mapping[str, MeshAxes]

    def __post_init__(self) -> None:
        mapping = {name: _checked(name, axes) for name, axes in dict(self.mapping).items()}
        object.__setattr__(self, "mapping", MappingProxyType(mapping))

    def __hash__(self) -> int:
        return hash(frozenset(self.mapping.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and dict(self.mapping) == dict(other.mapping)

    def __reduce__(self) -> tuple:
        return (Rules, (dict(self.mapping),))

    def replace(self, changes: Mapping[str, MeshAxes]) -> Rules:
        """New rules in which the entries of `changes` are added or take the place of these."""
        return Rules({**self.mapping, **changes})

    def spec(self, axes: LogicalAxes) -> PartitionSpec:
        """Logical name per dimension (None: not split) -> the PartitionSpec.

        Raises `ValueError` for an unknown name (listing those known), and when two dimensions
        would be split over the same mesh axis.
        """
        entries = tuple(self._lookup(name, axes) for name in axes)
        owner: dict[str, int] = {}
        for dim, entry in enumerate(entries):
            for mesh_axis in _as_tuple(entry):
                first = owner.setdefault(mesh_axis, dim)
                if first != dim:
                    raise ValueError(
                        f"logical axes {tuple(axes)} use mesh axis {mesh_axis!r} twice: for "
                        f"dimension {first} ({axes[first]!r}) and dimension {dim} ({axes[dim]!r})"
                    )
        return PartitionSpec(*entries)

    def sharding(self, mesh: Mesh, axes: LogicalAxes) -> NamedSharding:
        """Logical name per dimension -> NamedSharding on `mesh`.

        Raises `ValueError` as `spec` does, and when a rule names an axis the mesh lacks.
        """
        spec = self.spec(axes)
        for name, entry in zip(axes, spec, strict=True):
            missing = [axis for axis in _as_tuple(entry) if axis not in mesh.axis_names]
            if missing:
                raise ValueError(
                    f"the rule {name!r} -> {entry!r} names mesh axis {missing[0]!r}, "
                    f"but the mesh has {', '.join(map(str, mesh.axis_names))}"
                )
        return NamedSharding(mesh, spec)

    def shards(self, mesh: Mesh | None, axis: str) -> int:
        """Into how many parts `mesh` splits the logical axis; 1 without a mesh."""
        if mesh is None:
            return 1
        return math.prod(mesh.shape[name] for name in _as_tuple(self._lookup(axis, (axis,))))

    def _lookup(self, name: str | None, axes: LogicalAxes) -> MeshAxes:
        if name is None:
            return None
        if name not in self.mapping:
            known = ", ".join(sorted(self.mapping))
            raise ValueError(f"logical axis {name!r} of {tuple(axes)} has no rule; known: {known}")
        return self.mapping[name]


def _as_tuple(entry: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of one dimension."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _checked(name: str, axes: MeshAxes) -> MeshAxes:
    """One rule in its normal form: a list becomes a tuple."""
    if not isinstance(name, str):
        raise ValueError(f"logical axis {name!r} must be a string")
    if axes is None or isinstance(axes, str):
        return axes
    if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) for axis in axes):
        raise ValueError(
            f"rule {name!r} -> {axes!r} must name a mesh axis, a tuple of mesh axes, or None"
        )
    if len(set(axes)) < len(axes):
        raise ValueError(f"rule {name!r} -> {axes!r} names a mesh axis twice")
    # PartitionSpec(("fsdp",)) and PartitionSpec("fsdp") mean the same and must compare equal.
    return (axes[0] if len(axes) == 1 else tuple(axes)) if axes else None


_ROWS = ("data", "fsdp", "expert", "expert_tensor")
DEFAULT_RULES = Rules(
    {
        # weights
        "vocab": "tensor",
        # Every axis that splits tokens also splits the weights that all tokens go through.
        "embed": ("fsdp", "context", "expert", "expert_tensor"),
        "heads": "tensor",
        "kv_heads": "tensor",
        "head_dim": None,
        "mlp": "tensor",
        "layers": None,
        "experts": "expert",
        "expert_mlp": ("tensor", "expert_tensor"),
        "expert_embed": ("fsdp", "context"),
        # activations
        "batch": _ROWS,
        "length": "context",
        # the residual stream and its norms, between what is split by tensor
        "residual": ("context", "tensor"),
        # rows of a cache: a step of decoding has no length that `context` could split
        "slots": ("data", "fsdp", "context", "expert", "expert_tensor"),
    }
)
"""Rules for the logical axes of `jaxrl.models`: weights and their optimizer state are split over
all axes but `data`; rows of a batch over `data`, `fsdp`, `expert` and `expert_tensor`, of which the
last two mean more to experts; what is between over `context` and `tensor`."""

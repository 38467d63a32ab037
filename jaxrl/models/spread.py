"""How the activations of one call lie on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxrl.sharding import Rules


@dataclasses.dataclass(frozen=True)
class Spread:
    """The logical axes that split the rows and the length of activations [B, T, ...].

    `rows` is "batch", "slots" or None, `length` "length" or None, `residual` (the length of the
    residual stream and its norms) "residual", "length" or None; None: not split.
    """

    mesh: Mesh
    rules: Rules
    rows: str | None
    length: str | None
    residual: str | None

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Logical axis per dimension -> how it is split in this call."""
        own = {"batch": self.rows, "length": self.length, "residual": self.residual}
        return self.rules.sharding(self.mesh, tuple(own.get(name, name) for name in axes)).spec

    def pin(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """x with its sharding pinned."""
        sharding = jax.sharding.NamedSharding(self.mesh, self.spec(axes))
        return jax.lax.with_sharding_constraint(x, sharding)

    def parts(self, axis: str) -> int:
        """Into how many parts this call splits the activation axis "batch", "length", …"""
        own = {"batch": self.rows, "length": self.length, "residual": self.residual}
        name = own.get(axis, axis)
        return 1 if name is None else self.rules.shards(self.mesh, name)

    @property
    def stream(self) -> tuple[str, ...]:
        """The mesh axes that split the length of the residual stream only."""
        whole = mesh_axes(self.spec(("length",))[0])
        return tuple(name for name in mesh_axes(self.spec(("residual",))[0]) if name not in whole)

    @property
    def divided(self) -> bool:
        """Whether no two devices have the same tokens, but for those that split weights instead."""
        tokens = {name for entry in self.spec(("batch", "length")) for name in mesh_axes(entry)}
        weights = mesh_axes(self.rules.spec(("heads",))[0])
        return tokens.union(weights).issuperset(self.mesh.axis_names)

    def several(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those mesh axes with more than one device: a collective among one is still a copy."""
        return tuple(name for name in names if self.mesh.shape[name] > 1)

    @property
    def platform(self) -> str:
        """The kind of device that the program will run on, also when it is compiled elsewhere."""
        return self.mesh.devices.flat[0].platform


def mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one dimension of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spread_over(
    mesh: Mesh | None,
    rules: Rules,
    batch: int,
    length: int,
    *,
    cached: bool = False,
    streamed: bool = True,
) -> Spread | None:
    """How activations [batch, length, ...] are split over `mesh`; None without one.

    What does not divide stays whole: every group of devices then works on the same rows (as on a
    single prompt), or on the same tokens. `cached`: rows are those of a cache, which has no length
    to split; the axes that split the length of other calls split its rows too. `streamed`: the
    residual stream may be split further.
    """
    if mesh is None:
        return None

    def fits(size: int, axis: str) -> bool:
        return size % rules.shards(mesh, axis) == 0

    if cached and fits(batch, "slots"):
        return Spread(mesh, rules, "slots", None, None)
    rows = "batch" if fits(batch, "batch") else None
    if not fits(length, "length"):
        return Spread(mesh, rules, rows, None, None)
    residual = "residual" if streamed and fits(length, "residual") else "length"
    return Spread(mesh, rules, rows, "length", residual)

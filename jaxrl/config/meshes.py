"""The sections of the configuration that divide weights and work over devices."""

from __future__ import annotations

from jaxrl.config import rules
from jaxrl.config.schema import common, demand, rare, section, section_info


@section("mesh.")
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices."""

    data: int = common(-1, "copies of the weights; rows of a batch divide here", rules.axis_size())
    fsdp: int = common(1, "weights divide here and are gathered for use", rules.axis_size())
    tensor: int = common(1, "heads, MLP and vocabulary divide here", rules.axis_size())
    context: int = rare(1, "the length of a sequence divides here", rules.axis_size())
    expert: int = rare(1, "experts divide here", rules.axis_size())
    expert_tensor: int = rare(1, "the MLP within an expert divides here", rules.axis_size())

    def sizes(self) -> dict[str, int]:
        """Axis -> size, the keyword arguments of `jaxrl.sharding.make_mesh`."""
        return {name: getattr(self, name) for name in section_info(self).fields}

    def check(self) -> None:
        """At most one axis takes what the others leave."""
        free = [name for name, size in self.sizes().items() if size == -1]
        if len(free) > 1:
            demand(False, f"mesh.{free[1]}", -1, f"a number: mesh.{free[0]} is -1 already")


@section("sampler_mesh.")
class SamplerMeshConfig:
    """Sizes of the mesh axes that the sampler's copy of the weights is divided over. `data` takes
    the rest of the devices: of a run's only process, or of each of several."""

    tensor: int = common(
        0,
        "heads, MLP and vocabulary divide here, and nothing is gathered for use",
        rules.at_least(0, "0: as in mesh, as far as the devices of a process go"),
    )
    expert: int = rare(0, "experts divide here", rules.at_least(0, "0: as for tensor"))
    expert_tensor: int = rare(
        0, "the MLP within an expert divides here", rules.at_least(0, "0: as for tensor")
    )
    fsdp: int = rare(
        0,
        "weights divide here and are gathered for every token",
        rules.at_least(0, "0: as for tensor"),
    )

    def sizes(self) -> dict[str, int]:
        """Axis -> size; 0: as in mesh."""
        return {name: getattr(self, name) for name in section_info(self).fields}

"""One process of a job that publishes weights: `copies_worker.py SCENARIO PORT COUNT INDEX FOLDER`.

The trainer's mesh has its devices in the order that SCENARIO names: that of the processes
("ordered"), or every process's in turn ("mixed"), as links of a TPU slice may have them.
"""

from __future__ import annotations

import functools
import operator
import sys

import numpy as np

from jaxrl.distributed import join

ROWS, COLUMNS = 16, 24


def main() -> None:
    """Publish twice what all hold together, and compare with the whole on every process."""
    order, port, count, index = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with join(f"127.0.0.1:{port}", count, index):
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        from jaxrl.sharding import AXES, make_mesh, process_meshes
        from jaxrl.weights.exchange import publish_to_sampler

        devices = jax.devices()
        if order == "mixed":
            owned = len(devices) // count
            devices = [devices[at + owned * each] for at in range(owned) for each in range(count)]
        grid = np.array(devices).reshape(1, len(devices), 1, 1, 1, 1)
        trainer = jax.sharding.Mesh(grid, AXES, axis_types=make_mesh(data=-1).axis_types)
        meshes = process_meshes(tensor=-1)
        whole = np.linspace(-1, 1, ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
        split = NamedSharding(trainer, PartitionSpec("fsdp"))
        abstract = {"w": jax.ShapeDtypeStruct(whole.shape, jnp.bfloat16)}
        shardings = {"w": NamedSharding(meshes[index], PartitionSpec(None, "tensor"))}
        for number in (0, 1):
            place = functools.partial(operator.getitem, whole)
            params = {"w": jax.make_array_from_callback(whole.shape, split, place)}
            copy = publish_to_sampler(params, number, abstract, shardings, meshes=meshes)
            assert copy.narrow
            assert copy.version.number == number
            got = copy.params["w"]
            assert got.sharding == shardings["w"], got.sharding
            np.testing.assert_array_equal(
                np.asarray(got), np.asarray(jnp.asarray(whole, "bfloat16"))
            )
            whole = whole + 1
        sys.stdout.write(f"{copy.version} {copy.digest}\n")


if __name__ == "__main__":
    main()

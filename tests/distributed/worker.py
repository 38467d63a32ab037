"""One process of a job for the tests: `worker.py SCENARIO PORT COUNT INDEX FOLDER [OPTION...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

SCENARIO, PORT, COUNT, INDEX, FOLDER, *OPTIONS = sys.argv[1:]
COUNT, INDEX = int(COUNT), int(INDEX)
MISFIT = INDEX == COUNT - 1
"""Whether this is the process that does something else than the others."""


def say(*words: object) -> None:
    """Write a line that the test sees at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def start(**more: object):
    """Join the job with short times."""
    from jaxrl.distributed import Watch, join
    from jaxrl.observe.logger import setup_logging

    setup_logging(rank=INDEX)
    watch = Watch(
        heartbeat_s=0.2, report_after_s=1.5, exit_after_s=4.0, dead_after_s=4.0, grace_s=2.0
    )
    return join(
        f"127.0.0.1:{PORT}",
        COUNT,
        INDEX,
        **{"timeout_s": 60.0, "watch": watch, "logs": FOLDER, "agree_timeout_s": 60.0, **more},
    )


def programs():
    """(mesh, inputs, two programs of the same shapes and collectives whose numbers differ)."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxrl.sharding import make_mesh

    mesh = make_mesh(data=-1)
    spec = PartitionSpec("data")

    def mapped(function: Callable) -> object:
        body = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(body)

    def placed(size: int = 4):
        local = np.full((size * jax.local_device_count(),), INDEX + 1.0, np.float32)
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)

    summed = mapped(lambda x: jax.lax.psum(x, "data") + 0 * x)
    tens = mapped(lambda x: jax.lax.psum(10 * x, "data") + 0 * x)
    gathered = mapped(lambda x: jnp.max(jax.lax.all_gather(x, "data"), 0) + 0 * x)
    return placed, summed, tens, gathered


def number(array) -> float:
    """The first number of this process's part."""
    return float(array.addressable_shards[0].data[0])


def good() -> None:
    """Ten steps; numbers as they have to be."""
    with start() as processes:
        placed, summed, tens, _ = programs()
        one = processes.checked(summed, name="one")
        two = processes.checked(tens, name="two")
        x = placed()
        for step in range(10):
            processes.enter("training", step=step)
            a, b = number(one(x)), number(two(x))
            expected = COUNT * (COUNT + 1) / 2
            assert (a, b) == (expected, 10 * expected), (a, b)
        assert number(one(placed(8))) == expected  # another shape: another program
        assert one._cache_size() == 2
        processes.verify("checkpoint")
    say("done", a, b)


def main() -> None:
    globals()[SCENARIO]()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()

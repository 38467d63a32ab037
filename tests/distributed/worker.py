"""One process of a job for the tests: `worker.py SCENARIO PORT COUNT INDEX FOLDER [OPTION...]`."""

from __future__ import annotations

import sys
import time
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


def start(*, exit_after_s: float = 4.0, **more: object):
    """Join the job with short times."""
    from jaxrl.distributed import Watch, join
    from jaxrl.observe.logger import setup_logging

    setup_logging(rank=INDEX)
    watch = Watch(
        heartbeat_s=0.2,
        report_after_s=1.5,
        exit_after_s=exit_after_s,
        dead_after_s=4.0,
        grace_s=2.0,
    )
    return join(
        f"127.0.0.1:{PORT}",
        COUNT,
        INDEX,
        **{"timeout_s": 60.0, "watch": watch, "logs": FOLDER, "agree_timeout_s": 60.0, **more},
    )


def service() -> str:
    """The process in which JAX's coordination service runs; only process 0 knows it."""
    from jax._src import distributed

    found = distributed.global_state.service
    return "" if found is None else f"service={found.pid}."


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
        assert start() is processes
        placed, summed, tens, _ = programs()
        one = processes.checked(summed, name="one")
        two = processes.checked(tens, name="two")
        x = placed()
        for step in range(10):
            processes.enter("training", step=step)
            a, b = number(one(x)), number(two(x))
            expected = x.size / 4 / COUNT * COUNT * (COUNT + 1) / 2  # of every device
            assert (a, b) == (expected, 10 * expected), (a, b)
        assert number(one(placed(8))) == expected  # another shape: another program
        assert one._cache_size() == 2
        processes.agree("by hand", tens.lower(x).compile(), x)
        processes.verify("checkpoint")
        group = processes.group(x.sharding.mesh, "data")
        total = processes.collectives(group).all_reduce(INDEX + 1, "sum")
        assert (int(total), group.rank, group.size) == (COUNT * (COUNT + 1) / 2, INDEX, COUNT)
    say("done", a, b)


def skip() -> None:
    """The last process leaves a step out."""
    with start() as processes:
        placed, summed, _, _ = programs()
        one, x = processes.checked(summed, name="one"), placed()
        for step in range(400):
            if MISFIT and step == 5:
                continue
            processes.enter("training", step=step)
            number(one(x))
    say("done")


def skip_unnumbered() -> None:
    """The same where steps have no numbers: it shows only at the end."""
    with start() as processes:
        placed, summed, _, _ = programs()
        one, x = processes.checked(summed, name="one"), placed()
        for _ in range(9 if MISFIT else 10):
            number(one(x))
    say("done")


def swapped() -> None:
    """The last process runs two programs the other way round: their collectives fit each other."""
    with start() as processes:
        placed, summed, tens, _ = programs()
        x = placed()
        one, two = processes.checked(summed, name="one"), processes.checked(tens, name="two")
        one(x), two(x)
        first, second = (two, one) if MISFIT else (one, two)
        for step in range(400):
            processes.enter("training", step=step)
            number(first(x)), number(second(x))
    say("done")


def swapped_first() -> None:
    """Already the first runs are the other way round."""
    with start() as processes:
        placed, summed, tens, _ = programs()
        one, two = processes.checked(summed, name="one"), processes.checked(tens, name="two")
        for program in (two, one) if MISFIT else (one, two):
            program(placed())
    say("done")


def shapes() -> None:
    """The last process has inputs of another shape."""
    with start() as processes:
        placed, summed, _, _ = programs()
        processes.checked(summed, name="one")(placed(8 if MISFIT else 4))
    say("done")


def late_shape() -> None:
    """The same after some steps, when the others run what they have compiled already."""
    with start() as processes:
        placed, summed, _, _ = programs()
        one = processes.checked(summed, name="one")
        for step in range(400):
            number(one(placed(8 if MISFIT and step == 5 else 4)))
    say("done")


def kinds() -> None:
    """The last process has another collective in a program of the same name."""
    with start() as processes:
        placed, summed, _, gathered = programs()
        processes.checked(gathered if MISFIT else summed, name="one")(placed())
    say("done")


def config() -> None:
    """The last process has another configuration."""
    start(fingerprint={"config": {"train": {"seed": 7 if MISFIT else 0}, "same": 1}}).close()
    say("done")


def code() -> None:
    """The last process runs other source code of jaxrl."""
    if MISFIT:
        from jaxrl.distributed import startup, versions

        startup.versions = lambda: {**versions.versions(), "code of jaxrl": "changed"}
    start().close()
    say("done")


def unreachable() -> None:
    """Nobody listens."""
    start(timeout_s=1.0)


def meet() -> None:
    """Join and leave."""
    start(timeout_s=3.0).close()
    say("done")


def steps() -> None:
    """Steps until something happens."""
    # The silence of another process has to be found first, as with the times of a real job.
    with start(exit_after_s=60.0) as processes:
        placed, summed, _, _ = programs()
        one, x = processes.checked(summed, name="one"), placed()
        for step in range(100_000):
            processes.enter("training", step=step)
            number(one(x))
            if step == 3:
                say("running", service())
            time.sleep(0.02)


def waiting() -> None:
    """All processes but the last wait in a program that it never comes to."""
    with start() as processes:
        placed, summed, _, _ = programs()
        one, x = processes.checked(summed, name="one"), placed()
        number(one(x))
        say("running")
        processes.exchange("a share", b"")
        if MISFIT:
            time.sleep(1000)
        processes.enter("training", step=1)
        number(one(x))


def raising() -> None:
    """The last process fails by itself."""
    with start() as processes:
        placed, summed, _, _ = programs()
        one, x = processes.checked(summed, name="one"), placed()
        for step in range(1000):
            if MISFIT and step == 5:
                raise ValueError("the data is broken")
            number(one(x))


def main() -> None:
    globals()[SCENARIO]()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()

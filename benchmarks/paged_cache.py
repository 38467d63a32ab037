"""What a paged cache would cost and save in decoding: one layer's attention, and memory.

`python benchmarks/paged_cache.py [--repeats N]`: attention of one decode step over contiguous rows
[B, K, S, H], as the engine has them, against a pool of pages with a table of indices for each row,
in XLA on the device at hand; SmolLM2-135M's heads, float32. Both write the new token first. In
turn, in one process, CPU-seconds. Then the share of the memory that holds tokens under a load of
mixed lengths. Prints JSON.
"""

from __future__ import annotations

import argparse
import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from shapes import emit, now

from jaxrl.models.attention import attend, cache_mask, write_cache

HEADS, KV_HEADS, WIDTH = 9, 3, 64
STEPS = 20


def contiguous(query, new, position, keys, values):
    """query [B, 1, N, H], new [B, 1, K, H], position [B], cache [B, K, S, H] -> mixed, cache."""
    keys = write_cache(keys, new, position[:, None])
    values = write_cache(values, new, position[:, None])
    mask = cache_mask(position[:, None], keys.shape[2])
    return attend(query, keys, values, mask), keys, values


def paged(query, new, position, keys, values, *, table):
    """The same over a pool [P, K, page, H]; row b's entries are in the pages `table[b]`."""
    page = keys.shape[2]
    rows = jnp.arange(len(position))
    place = (table[rows, position // page], slice(None), position % page)
    keys, values = (pool.at[place].set(new[:, 0]) for pool in (keys, values))
    seen = [
        jnp.moveaxis(pool[table], 1, 2).reshape(len(position), KV_HEADS, -1, WIDTH)
        for pool in (keys, values)
    ]
    mask = cache_mask(position[:, None], seen[0].shape[2])
    return attend(query, *seen, mask), keys, values


def loop(step):
    """`STEPS` steps, each with the result of the one before; the cache is donated."""

    def run(query, new, position, keys, values):
        def one(i, carry):
            query, keys, values = carry
            return step(query, new, position + i, keys, values)

        return jax.lax.fori_loop(0, STEPS, one, (query, keys, values))

    return jax.jit(run, donate_argnums=(3, 4))


def programs(batch: int, length: int) -> dict[str, tuple]:
    """Name -> (program, its arguments besides the cache, shape of the cache)."""
    rng = np.random.default_rng(0)
    query = jnp.array(rng.normal(size=(batch, 1, HEADS, WIDTH)).astype(np.float32))
    new = jnp.array(rng.normal(size=(batch, 1, KV_HEADS, WIDTH)).astype(np.float32))
    position = jnp.full(batch, length - STEPS - 1, jnp.int32)
    made = {"contiguous": (loop(contiguous), (batch, KV_HEADS, length, WIDTH))}
    for page in (16, 64):
        pages = batch * length // page
        table = jnp.array(rng.permutation(pages).reshape(batch, -1))
        step = functools.partial(paged, table=table)
        made[f"paged_{page}"] = (loop(step), (pages, KV_HEADS, page, WIDTH))
    return {name: (run, (query, new, position), shape) for name, (run, shape) in made.items()}


def time_all(batch: int, length: int, repeats: int) -> dict[str, float]:
    """Name -> CPU-milliseconds of one layer's step, medians of rounds in turn."""
    made = programs(batch, length)
    caches = {name: [jnp.ones(shape), jnp.ones(shape)] for name, (_, _, shape) in made.items()}
    seen: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repeats + 1):
        for name, (run, inputs, _) in made.items():
            start = now()[0]
            _, *caches[name] = jax.block_until_ready(run(*inputs, *caches[name]))
            seen[name].append((now()[0] - start) / STEPS * 1000)
    return {name: round(statistics.median(times[1:]), 3) for name, times in seen.items()}


def memory_in_use(slots: int, max_length: int, requests: int = 20000) -> dict[str, float]:
    """Share of the reserved memory that holds tokens, over a long load with full slots.

    Prompts and completions are lognormal (medians 128 and 128, sigma 1), cut at half of
    `max_length` each. Contiguous rows reserve `max_length` entries; pages of 16 reserve what a
    sequence has so far, rounded up.
    """
    rng = np.random.default_rng(0)
    half = max_length // 2
    prompt, new = (
        np.clip(rng.lognormal(np.log(128), 1, requests).astype(int), 1, half) for _ in range(2)
    )
    # A sequence stays `new` steps and holds prompt + i entries at step i: sums over its life.
    held = prompt * new + new * (new + 1) / 2
    pages = (prompt // 16 + 1) * 16 * new + new * (new + 1) / 2
    return {
        "slots": slots,
        "max_length": max_length,
        "contiguous": round(float(held.sum() / (max_length * new.sum())), 3),
        "paged_16": round(float(held.sum() / pages.sum()), 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    sizes = [(batch, length) for batch in (8, 32) for length in (512, 2048)]
    times = {f"{b}x{s}": time_all(b, s, args.repeats) for b, s in sizes}
    memory = [memory_in_use(32, length) for length in (512, 2048)]
    emit(
        {
            "benchmark": "paged_cache",
            "jax": jax.__version__,
            "cpu_ms_per_layer_step": times,
            "memory_in_use": memory,
        }
    )


if __name__ == "__main__":
    main()

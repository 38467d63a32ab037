"""Keys and values in rows of one slot each, against pages of a pool with a table. Prints JSON.

`python benchmarks/paged_cache.py [--rounds N]`: the attention of one decode step at SmolLM2-135M's
shape (9 heads, 3 kv heads, head width 64, float32), over four layers with caches of their own, the
new token's key and value written first. Compared with the rows are pages that are gathered and then
attended to as rows (`gathered`), and pages that are visited one after another with a running
softmax, up to the longest row (`visited`). CPU milliseconds of one layer, and what a layout holds
in memory at mixed lengths, from the distribution of lengths alone.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from shapes import emit
from workers import medians, timed

from jaxrl.models.attention import attend_by_head, write_cache

HEADS, KV_HEADS, WIDTH, LAYERS = 9, 3, 64, 4
GROUP = HEADS // KV_HEADS


def rows(
    query: jax.Array, new: tuple, cache: tuple, table: jax.Array, position: jax.Array
) -> tuple[jax.Array, tuple]:
    """Attention as the engine computes it. query [B, 1, K, G, H], new [B, 1, K, H] twice, cache
    [B, K, S, H] twice, position [B] -> mixed values like the query, the cache."""
    cache = tuple(write_cache(c, n, position[:, None]) for c, n in zip(cache, new, strict=True))
    mask = (jnp.arange(cache[0].shape[2]) <= position[:, None])[:, None]
    return attend_by_head(query, *cache, mask), cache


def gathered(
    query: jax.Array, new: tuple, cache: tuple, table: jax.Array, position: jax.Array
) -> tuple[jax.Array, tuple]:
    """`rows` for a cache of pages [K, P, page, H] twice, table [B, S/page]."""
    cache = _write_page(cache, new, table, position)
    keys, values = (_gather(pool, table) for pool in cache)
    mask = (jnp.arange(keys.shape[2]) <= position[:, None])[:, None]
    return attend_by_head(query, keys, values, mask), cache


def visited(
    query: jax.Array, new: tuple, cache: tuple, table: jax.Array, position: jax.Array
) -> tuple[jax.Array, tuple]:
    """`gathered` without ever holding the rows: page by page, with a running maximum and sum."""
    cache = _write_page(cache, new, table, position)
    page, batch = cache[0].shape[2], query.shape[0]
    shape = (KV_HEADS, batch, GROUP)
    heads = query[:, 0].transpose(1, 0, 2, 3)

    def visit(i: jax.Array, carry: tuple) -> tuple:
        top, total, mixed = carry
        keys, values = (pool[:, table[:, i]] for pool in cache)
        scores = jnp.einsum("kbgh,kbph->kbgp", heads, keys)
        seen = i * page + jnp.arange(page) <= position[:, None]
        scores = jnp.where(seen[None, :, None], scores, -1e30)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        mixed = mixed * shrink[..., None] + jnp.einsum("kbgp,kbph->kbgh", weights, values)
        return higher, total * shrink + jnp.sum(weights, axis=-1), mixed

    start = jnp.full(shape, -1e30), jnp.zeros(shape), jnp.zeros((*shape, WIDTH))
    _, total, mixed = jax.lax.fori_loop(0, jnp.max(position) // page + 1, visit, start)
    return (mixed / total[..., None]).transpose(1, 0, 2, 3)[:, None], cache


def _write_page(cache: tuple, new: tuple, table: jax.Array, position: jax.Array) -> tuple:
    page = cache[0].shape[2]
    number = jnp.take_along_axis(table, position[:, None] // page, axis=1)[:, 0]
    return tuple(
        pool.at[:, number, position % page].set(n[:, 0].swapaxes(0, 1))
        for pool, n in zip(cache, new, strict=True)
    )


def _gather(pool: jax.Array, table: jax.Array) -> jax.Array:
    """[K, P, page, H] -> [B, K, S, H]."""
    found = pool[:, table]
    return found.reshape(KV_HEADS, table.shape[0], -1, WIDTH).swapaxes(0, 1)


def compile_step(
    layout: Callable, cache: list, table: np.ndarray, position: np.ndarray
) -> Callable:
    """A compiled step over all layers, each of which feeds the next; the caches are donated."""

    def step(query: jax.Array, caches: list) -> tuple[jax.Array, list]:
        written = []
        for cache in caches:
            new = (query[:, :, :, 0],) * 2
            mixed, cache = layout(query, new, cache, jnp.array(table), jnp.array(position))
            query = query + mixed
            written.append(cache)
        return query, written

    batch = len(position)
    query = jax.ShapeDtypeStruct((batch, 1, KV_HEADS, GROUP, WIDTH), jnp.float32)
    return jax.jit(step, donate_argnums=1).lower(query, cache).compile()


def compare(batch: int, length: int, page: int, rounds: int) -> dict[str, float]:
    """CPU milliseconds of one layer for each layout; rows end between half and all of `length`."""
    rng = np.random.default_rng(0)
    position = rng.integers(length // 2, length, batch).astype(np.int32)
    count = length // page
    table = rng.permutation(batch * count).reshape(batch, count).astype(np.int32)
    whole = [
        tuple(rng.standard_normal((batch, KV_HEADS, length, WIDTH), np.float32) for _ in range(2))
        for _ in range(LAYERS)
    ]

    def paged(row: np.ndarray) -> np.ndarray:
        pool = np.empty((KV_HEADS, batch * count, page, WIDTH), np.float32)
        pages = row.reshape(batch, KV_HEADS, count, page, WIDTH).transpose(1, 0, 2, 3, 4)
        pool[:, table.reshape(-1)] = pages.reshape(KV_HEADS, -1, page, WIDTH)
        return pool

    query = rng.standard_normal((batch, 1, KV_HEADS, GROUP, WIDTH), np.float32) * WIDTH**-0.5
    caches = {
        rows: jax.device_put(whole),
        gathered: jax.device_put(jax.tree.map(paged, whole)),
        visited: jax.device_put(jax.tree.map(paged, whole)),
    }
    programs = {f: compile_step(f, cache, table, position) for f, cache in caches.items()}
    results, times = {}, []
    for _ in range(rounds + 1):
        one = {}
        for layout, program in programs.items():
            run = functools.partial(_finish, program, query, caches[layout])
            (results[layout], caches[layout]), taken = timed(run)
            one[layout.__name__] = 1e3 * taken["cpu"] / LAYERS
        times.append(one)
    for layout in (gathered, visited):
        np.testing.assert_allclose(results[layout], results[rows], rtol=1e-4, atol=1e-4)
    return medians(times[1:])


def _finish(program: Callable, *arguments: object) -> tuple:
    return jax.block_until_ready(program(*arguments))


def memory(longest: int, prompt: int, page: int) -> dict[str, dict[str, float]]:
    """Share of the held entries that hold a token, averaged over the time that requests run.

    Rows hold prompt + `longest` new tokens from the start; pages come when they are needed. Lengths
    are spread evenly up to `longest`, or exponentially with a quarter of it as their mean and cut.
    """
    rng, record = np.random.default_rng(0), {}
    lengths = {
        "even": rng.integers(1, longest + 1, 10_000),
        "exponential": np.minimum(rng.exponential(longest / 4, 10_000).astype(int) + 1, longest),
    }
    for name, drawn in lengths.items():
        steps = np.concatenate([np.arange(1, n + 1) for n in drawn]) + prompt
        held = -(-steps // page) * page
        share = {"rows": steps.mean() / (prompt + longest), "pages": steps.sum() / held.sum()}
        record[name] = {layout: round(float(x), 3) for layout, x in share.items()}
    return record


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    cpu_ms = {
        f"batch_{batch}_length_{length}_page_{page}": compare(batch, length, page, args.rounds)
        for batch in (8, 32)
        for length in (512, 2048)
        for page in (16, 64)
    }
    used = {
        f"length_{length}_page_{page}": memory(length - length // 4, length // 4, page)
        for length in (512, 2048)
        for page in (16, 64)
    }
    emit({"benchmark": "paged_cache", "jax": jax.__version__, "cpu_ms": cpu_ms, "used": used})


if __name__ == "__main__":
    main()

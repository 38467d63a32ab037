"""Decoding with SmolLM2-135M in jaxrl against transformers and torch, in turn. Prints JSON.

`python benchmarks/decode_smollm2.py --gguf FILE [--peer-python PATH] [--rounds N]`. PATH is the
interpreter of an environment with the extra `interop` (default: this one). Prompts of 32 tokens out
of this project's pages, 64 new tokens each, greedy, float32, batches of 1, 8 and 32; prompts differ
from row to row and from round to round. "whole" counts everything, "decode" what 63 more tokens
cost than one. In the same rounds the roofs are measured: `bound` is the least time that a step's
memory (weights, keys and values) or its products could take, in CPU-seconds, and `share` that time
over ours.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile

from shapes import emit
from workers import FOLDER, Worker, answer, medians, ratios, timed

PROMPT, NEW = 32, 64
CACHES = ("dynamic", "static")


def main() -> None:
    """Compare, or be the worker of this side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--threads", default="1,2", help="of torch; empty: no comparison")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--worker", help="folder of the weights: be the worker")
    parser.add_argument("--scan", action="store_true", help="scanned layers")
    parser.add_argument("--steps", type=int, default=16, help="tokens per slot and dispatch")
    parser.add_argument("--attend", default="64,96", help="cache lengths that are attended to")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    if args.worker:
        be_worker(args)
    elif args.gguf:
        emit({"benchmark": "decode_smollm2", "args": vars(args), **compare(args)})
    else:
        parser.error("--gguf is needed")


def compare(args: argparse.Namespace) -> dict:
    """Rounds of all measurements -> medians, ratios, and the distance from the roofs."""
    batches = [int(b) for b in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        prepare(args.gguf, folder)
        options = ["--steps", str(args.steps), "--attend", args.attend, "--dtype", args.dtype]
        options += ["--scan"] if args.scan else []
        ours = Worker(sys.executable, "decode_smollm2.py", "--worker", folder, *options)
        roofs = Worker(sys.executable, "roofs.py", OPENBLAS_NUM_THREADS="1")
        peers = {
            int(n): Worker(
                args.peer_python, "decode_peer.py", "--folder", folder, "--threads", n,
                OMP_NUM_THREADS=n,
            )
            for n in filter(None, args.threads.split(","))
        }  # fmt: skip
        for worker in (ours, roofs, *peers.values()):
            stack.callback(worker.close)
        texts = prompts_of(args.gguf)
        jax_version = ours.ask(prompts=[], new=0)["jax"]
        runs: dict[int, list[dict]] = {b: [] for b in batches}
        for number in range(args.rounds + 1):
            for batch in batches:
                one = one_round(ours, peers, texts, batch)
                one["roofs"] = roofs.ask()
                if number:  # the first round warms up
                    runs[batch].append(one)
    result = {f"batch_{b}": summary(b, rounds, list(peers)) for b, rounds in runs.items()}
    return {"jax": jax_version, **result}


def one_round(ours: Worker, peers: dict[int, Worker], texts: list[list[int]], batch: int) -> dict:
    """Each side once with one new token and once with all; every call has prompts of its own."""

    def take() -> list[list[int]]:
        return [texts.pop() for _ in range(batch)]

    some, many = take(), take()
    record = {"ours": measure(ours, some, many)}
    for threads, peer in peers.items():
        # The second peer need not show again which cache is the faster one.
        for cache in CACHES:
            record[f"torch_{threads}_{cache}"] = measure(peer, some, many, cache=cache)
    return record


def measure(worker: Worker, some: list, many: list, **options: str) -> dict:
    """CPU and wall seconds of a whole generation, and of its decoding alone."""
    first = worker.ask(prompts=some, new=1, **options)
    whole = worker.ask(prompts=many, new=NEW, **options)
    times = {f"whole_{n}": whole[n] for n in ("cpu", "wall")}
    times |= {f"decode_{n}": whole[n] - first[n] for n in ("cpu", "wall")}
    return {"tokens": whole["tokens"], "times": times}


def summary(batch: int, rounds: list[dict], threads: list[int]) -> dict:
    """Medians of one batch size."""
    ours = [r["ours"]["times"] for r in rounds]
    record = {"jaxrl": rates(batch, medians(ours, 6)), **distance(batch, rounds)}
    for n in threads:
        sides = {cache: [r[f"torch_{n}_{cache}"] for r in rounds] for cache in CACHES}
        middle = {c: medians([r["times"] for r in side], 6) for c, side in sides.items()}
        best = min(CACHES, key=lambda c: middle[c]["whole_cpu"])
        record[f"torch_{n}"] = {"cache": best, **rates(batch, middle[best])}
        record[f"ratio_to_torch_{n}"] = ratios(ours, [r["times"] for r in sides[best]])
        record["same_tokens"] = same_tokens([r["ours"] for r in rounds], sides[best])
    return record


def rates(batch: int, times: dict[str, float]) -> dict[str, float]:
    """Tokens per CPU-second and per second."""
    counts = {"whole": batch * NEW, "decode": batch * (NEW - 1)}
    return {n: round(counts[n.split("_")[0]] / t, 2) for n, t in times.items()}


def distance(batch: int, rounds: list[dict]) -> dict:
    """A decode step against the memory and the products that it cannot do without."""
    from jaxrl.config import preset
    from jaxrl.models.model import build_model

    model = build_model(preset("smollm2-135m"))
    config, roofs = model.config, medians([r["roofs"] for r in rounds], 2)
    # On average half of the new tokens are in the cache.
    entries = batch * (PROMPT + NEW / 2) * config.n_kv_heads * config.head_dim * config.n_layers
    gigabytes = 4 * (model.n_params + 2 * entries) / 1e9
    heads = config.n_heads / config.n_kv_heads
    gflop = 2 * (batch * model.n_params + 2 * entries * heads) / 1e9
    memory = gigabytes / roofs["gb_per_cpu_second"]
    products = gflop / roofs["gflop_per_cpu_second"]
    times = medians([r["ours"]["times"] for r in rounds], 6)
    step = times["decode_cpu"] / (NEW - 1)
    bounds = {"memory": memory, "products": products, "measured": step}
    return {
        "roofs": roofs,
        "cpu_ms_per_step": {n: round(1e3 * t, 1) for n, t in bounds.items()},
        "share_of_bound": round(max(memory, products) / step, 2),
    }


def same_tokens(ours: list[dict], theirs: list[dict]) -> float:
    """Share of tokens that agree up to the first difference of each row."""
    agree = total = 0
    for a, b in zip(ours, theirs, strict=True):
        for mine, other in zip(a["tokens"], b["tokens"], strict=True):
            equal = [x == y for x, y in zip(mine, other, strict=True)]
            agree += equal.index(False) if False in equal else len(equal)
            total += len(equal)
    return round(agree / total, 4)


def prepare(gguf: str, folder: str) -> None:
    """The file's weights in float32, as both sides can read them."""
    from jaxrl.config import published_model
    from jaxrl.models.gguf import load_gguf
    from jaxrl.models.model import build_model
    from jaxrl.models.safetensors import save_params

    model = build_model(published_model(gguf, max_length=256))
    save_params(folder, model, load_gguf(gguf, model))


def prompts_of(gguf: str) -> list[list[int]]:
    """Pieces of 32 tokens of this project's pages."""
    from jaxrl.data.gguf_tokenizer import gguf_tokenizer

    tokenizer, _ = gguf_tokenizer(gguf)
    text = "\n".join(p.read_text() for p in sorted(FOLDER.parent.glob("docs/**/*.md")))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [ids[i : i + PROMPT] for i in range(0, len(ids) - PROMPT, PROMPT)]


def be_worker(args: argparse.Namespace) -> None:
    """Answer {prompts, new}: greedy tokens through a driver, CPU and wall seconds."""
    import jax
    import numpy as np

    from jaxrl.config import preset
    from jaxrl.inference.driver import Driver
    from jaxrl.inference.engine import Engine
    from jaxrl.models.model import build_model
    from jaxrl.models.safetensors import load_params
    from jaxrl.types import SamplingParams
    from jaxrl.weights.digest import stamp

    changes = {"scan_layers": args.scan, "dtype": args.dtype, "param_dtype": args.dtype}
    model = build_model(preset("smollm2-135m", **changes))
    params = load_params(args.worker, model)
    version, drivers = stamp(params, 0), {}
    attend = tuple(int(a) for a in args.attend.split(","))

    def generate(prompts: list[list[int]], new: int) -> dict:
        if not prompts:
            return {"jax": jax.__version__}
        size = len(prompts)
        if size not in drivers:
            engine = Engine(
                model,
                slots=size,
                max_length=PROMPT + NEW,
                prefill_buckets=(PROMPT,),
                attend_buckets=attend,
                steps_per_dispatch=args.steps,
                prefill_rows=8,
            )
            drivers[size] = Driver(engine, params, version).start(prefill_buckets=(PROMPT,))

        def work() -> list:
            how = SamplingParams(new, 0.0)
            futures = [drivers[size].submit(np.array(p, np.int32), how) for p in prompts]
            return [future.result().tokens.tolist() for future in futures]

        tokens, times = timed(work)
        return {"tokens": tokens, **times}

    answer(generate)


if __name__ == "__main__":
    main()

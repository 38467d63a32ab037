"""One server of `served_load.py`: ours, or JetStream's own around the same engine.

`python benchmarks/load_server.py jaxrl|jetstream` prints {"port": N} once it serves, and serves
until its input ends. Both have the same model, random weights, slots, and length; neither stops
before `max_tokens`, since no token ends a text here. Ours is what `jaxrl serve` starts, with its
defaults. Theirs is google-jetstream 0.2.2 as published: driver in interleaved mode, orchestrator
and server; only its log is turned down, which it would write for every step.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

import jax
import tokenizers
from load_requests import LENGTH, SLOTS
from shapes import SHAPE, VOCAB, emit

from jaxrl.cli.options import ServeOptions
from jaxrl.config import ModelConfig, RolloutConfig
from jaxrl.data.tokenizers import Tokenizer
from jaxrl.models.model import build_model, init_params
from jaxrl.weights.digest import stamp


def make_tokenizer() -> Tokenizer:
    """A word for each token; the end of a text lies outside the vocabulary."""
    words = {f"{i:03d} ": i for i in range(VOCAB)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    inner.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(inner, "words", pad_id=0, eos_id=VOCAB, bos_id=None)


def make_model() -> tuple[Any, Any, Any]:
    """(model, its random weights, their version)."""
    # Unrolled layers, as `jaxrl serve` takes them for published weights.
    model = build_model(ModelConfig(**{**SHAPE, "max_length": LENGTH, "scan_layers": False}))
    params = jax.device_put(init_params(model, 0), jax.devices()[0])
    return model, params, stamp(params, 0)


async def serve_ours(steps: int) -> None:
    """What `jaxrl serve` puts together, without its HTTP side."""
    from jaxrl.cli.served import prefill_rows
    from jaxrl.inference.driver import Driver
    from jaxrl.inference.engine import Engine
    from jaxrl.serving.backend import Backend
    from jaxrl.serving.grpc_server import start_grpc

    model, params, version = make_model()
    options = ServeOptions(weights="random")
    engine = Engine(
        model,
        slots=SLOTS,
        max_length=LENGTH,
        prefill_chunk=options.prefill_chunk,
        steps_per_dispatch=steps,
        **prefill_rows(),
    )
    driver = Driver(
        engine,
        params,
        version,
        tokenizer=make_tokenizer(),
        max_waiting=options.max_waiting,
        prefill_budget=options.prefill_chunk,
    )
    backend = Backend("model", timeout_s=options.timeout_s, max_waiting=options.max_waiting)
    backend.open(driver.start(), stop_ids=())
    server = await start_grpc(backend, "127.0.0.1", 0, None)
    emit({"port": server.port})
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
    driver.stop()


def serve_theirs(attend: Sequence[int]) -> None:
    """Their driver, orchestrator and server over our engine."""
    import grpc
    from jetstream.core import orchestrator, server_lib

    from jaxrl.inference.jetstream import make_engine

    logging.getLogger().setLevel(logging.WARNING)
    # They call a name that jax has dropped; nothing else of theirs is touched.
    jax.tree_map = jax.tree.map
    model, params, version = make_model()
    engine = make_engine(
        model,
        params,
        version,
        make_tokenizer(),
        slots=SLOTS,
        max_length=LENGTH,
        attend_buckets=attend,
    )
    driver = orchestrator.Driver(
        prefill_engines=[engine],
        generate_engines=[engine],
        prefill_params=[engine.load_params()],
        generate_params=[engine.load_params()],
        interleaved_mode=True,
    )
    port = free_port()
    # As many threads as their `run` takes for so few slots.
    server = server_lib.JetStreamServer(driver, 64, port, grpc.insecure_server_credentials())
    server.start()
    emit({"port": port})
    sys.stdin.read()
    server.stop()


def free_port() -> int:
    """A port that nobody listens on; theirs does not tell which it got."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("jaxrl", "jetstream"))
    parser.add_argument("--steps", type=int, default=RolloutConfig().steps_per_dispatch)
    parser.add_argument("--attend", type=int, nargs="*", default=(), help="lengths, for theirs")
    args = parser.parse_args()
    if args.side == "jaxrl":
        asyncio.run(serve_ours(args.steps))
    else:
        serve_theirs(args.attend)


if __name__ == "__main__":
    main()

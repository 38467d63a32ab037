"""Program: JetStream's own driver over our engine, beside our own driver over the same weights.

    python tests/inference/jetstream_conformance.py RESULT.json

A process of its own, since their driver ends it with SIGKILL whenever an engine raises, and since
importing it changes the logging of everybody. `test_jetstream.py` runs this and compares.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import ModelConfig
from jaxrl.data.streaming import TextDecoder
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.inference.driver import Driver
from jaxrl.inference.engine import Engine
from jaxrl.inference.jetstream import make_engine
from jaxrl.inference.jetstream_results import read_records
from jaxrl.models.model import build_model
from jaxrl.types import SamplingParams
from jaxrl.weights.digest import stamp

SLOTS, CHUNK, LONGEST, LENGTH, SEED = 3, 16, 64, 96, 5
SIZES = {"prefill_buckets": (8,), "prefill_chunk": CHUNK, "attend_buckets": (48,)}


class Bench:
    """A small model, our driver, and engines for theirs."""

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer("bytes")
        config = ModelConfig(
            n_layers=2,
            d_model=32,
            n_heads=4,
            n_kv_heads=2,
            head_dim=8,
            mlp_dim=64,
            vocab_size=self.tokenizer.vocab_size,
            max_length=LENGTH,
        )
        self.model = build_model(config)
        rng = np.random.default_rng(3)

        def leaf(like):
            scale = 0.3 if len(like.shape) > 1 else 0.1
            values = rng.normal(0, scale, like.shape) + (len(like.shape) == 1)
            return jnp.array(values.astype(like.dtype))

        self.params = jax.tree.map(leaf, self.model.abstract)
        self.version = stamp(self.params, 7)
        engine = Engine(
            self.model, slots=SLOTS, max_length=LENGTH, prefill_rows=1, max_stop_tokens=1, **SIZES
        )
        self.driver = Driver(engine, self.params, self.version).start()
        lengths = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 80)
        self.prompts = [rng.integers(3, 259, length).tolist() for length in lengths]
        self.tokenizer = dataclasses.replace(self.tokenizer, eos_id=self._choose_end(), stop_ids=())

    def _choose_end(self) -> int:
        """The end of a text shall be what the model says first after some prompt, `self.silent`,
        and does not say after another, `self.endless`, which then ends where the cache does."""
        said = [
            self.driver.sample_blocking(
                prompt[-LONGEST:], SamplingParams(LENGTH - min(LONGEST, len(prompt)), 0.0)
            ).tokens.tolist()
            for prompt in self.prompts
        ]
        self.silent, self.endless, end = next(
            (silent, endless, one[0])
            for silent, one in zip(self.prompts, said, strict=True)
            for endless, other in zip(self.prompts, said, strict=True)
            if one[0] not in other
        )
        return end

    def engine(self, **options):
        return make_engine(
            self.model,
            self.params,
            self.version,
            self.tokenizer,
            slots=SLOTS,
            max_length=LENGTH,
            **SIZES,
            **options,
        )

    def ours(self, prompt: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0):
        """The completion of our own driver, cut as theirs would cut the prompt."""
        prompt = prompt[-LONGEST:]
        most = min(max_tokens, LENGTH - len(prompt))
        stops = self.tokenizer.stop_ids
        return self.driver.sample_blocking(
            prompt, SamplingParams(most, temperature, seed, stop_tokens=stops)
        )

    def expected(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What clients of their server see: no stop token."""
        done = self.ours(prompt, max_tokens)
        return done.tokens.tolist()[: -1 if done.finish_reason == "stop" else None]


async def ask(orchestrator, request) -> tuple[list[int], str]:
    """Everything that one call streams."""
    tokens, text = [], ""
    async for response in orchestrator.Decode(request):
        for sample in response.stream_content.samples:
            tokens += sample.token_ids
            text += sample.text
    return tokens, text


def serve(bench: Bench, interleaved: bool) -> dict:
    """All requests at once, more than there are slots, through their driver."""
    from jetstream.core import orchestrator
    from jetstream.core.proto import jetstream_pb2 as pb

    # They call a name that jax has dropped; nothing else of theirs is touched.
    jax.tree_map = jax.tree.map
    if interleaved:
        prefill = generate = bench.engine()
    else:
        prefill, generate = bench.engine(role="prefill"), bench.engine(role="generate")
    driver = orchestrator.Driver(
        prefill_engines=[prefill],
        generate_engines=[generate],
        prefill_params=[prefill.load_params()],
        generate_params=[generate.load_params()],
        interleaved_mode=interleaved,
    )
    compiled = prefill.compile_count + generate.compile_count
    server = orchestrator.LLMOrchestrator(driver=driver)
    asked = [(prompt, 1 + (7 * i) % 20) for i, prompt in enumerate(bench.prompts)]
    asked += [(prompt, 1) for prompt in bench.prompts[:3]]
    asked += [(bench.endless, 1000), (bench.silent, 12)]
    requests = [
        pb.DecodeRequest(
            token_content=pb.DecodeRequest.TokenContent(token_ids=prompt), max_tokens=most
        )
        for prompt, most in asked
    ]
    texts = ["Grüße an 你好 und 🎉", "a", "the quick brown fox jumps"]
    requests += [
        pb.DecodeRequest(text_content=pb.DecodeRequest.TextContent(text=text), max_tokens=24)
        for text in texts
    ]

    async def all_at_once():
        return await asyncio.gather(*(ask(server, request) for request in requests))

    # Their thread may still tell the loop of an end that everybody knows: a closed loop would raise
    # there, and kill the process.
    with asyncio.Runner() as loop:
        answers = loop.run(all_at_once())
        driver.stop()
    for text in texts:
        asked.append((bench.tokenizer.encode(text), 24))
    expected = [bench.expected(*request) for request in asked]
    decoded = [TextDecoder(bench.tokenizer).push(ids) for ids in expected[-len(texts) :]]
    return {
        "asked": [[len(prompt), most] for prompt, most in asked],
        "tokens": [tokens for tokens, _ in answers],
        "expected": expected,
        "texts": [text for _, text in answers[-len(texts) :]],
        "expected_texts": decoded,
        "compiled_while_serving": prefill.compile_count + generate.compile_count - compiled,
    }


def verbs(bench: Bench) -> dict:
    """Sampled, by hand: what of each token is recorded, beside the completions of our driver."""
    from jetstream.engine import engine_api, token_utils

    engine = bench.engine(temperature=0.8, seed=SEED)
    weights, state = engine.load_params(), engine.init_decode_state()
    chosen = bench.prompts[1:10:4]
    for slot, prompt in enumerate(chosen):
        tokenizer = engine.build_tokenizer(engine.get_tokenizer())
        padded, length = token_utils.pad_tokens(
            np.array(prompt), tokenizer.bos_id, tokenizer.pad_id, max_prefill_length=LONGEST
        )
        prefix = engine.prefill(params=weights, padded_tokens=padded, true_length=length)
        state = engine.insert(prefix, state, slot)
    records = []
    for _ in range(10):
        state, result = engine.generate(weights, state)
        records.append(read_records(result.convert_to_numpy()))
    ours = [
        bench.ours(prompt, 10, 0.8, (SEED << 32) + request * SLOTS)
        for request, prompt in enumerate(chosen)
    ]
    return {
        "is_engine": isinstance(engine, engine_api.Engine),
        "tokens": [[int(r.tokens[slot]) for r in records] for slot in range(len(chosen))],
        "logprobs": [[float(r.logprobs[slot]) for r in records] for slot in range(len(chosen))],
        "versions": [[int(r.versions[slot]) for r in records] for slot in range(len(chosen))],
        "lengths": [[int(r.lengths[slot]) for r in records] for slot in range(len(chosen))],
        "expected_tokens": [done.tokens.tolist() for done in ours],
        "expected_logprobs": [done.logprobs.tolist() for done in ours],
    }


def page(bench: Bench) -> dict:
    """The examples of docs/jetstream.md, with a smaller engine."""
    text = Path("docs/jetstream.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    big, small = "slots=32, max_length=1024", "slots=2, max_length=48, attend_buckets=(48,)"
    assert big in first
    space = {"model": bench.model, "params": bench.params, "tokenizer": bench.tokenizer}
    exec(first.replace(big, small), space)
    from jetstream.core.proto import jetstream_pb2 as pb

    content = pb.DecodeRequest.TokenContent(token_ids=bench.endless[-8:])
    request = pb.DecodeRequest(token_content=content, max_tokens=5)
    with asyncio.Runner() as loop:
        tokens, _ = loop.run(ask(space["server"], request))
        space["driver"].stop()
    engine = space["engine"]
    space |= {"weights": engine.weights, "state": engine.init_decode_state()}
    exec(second, space)
    return {"tokens": tokens, "versions": space["records"].versions.tolist()}


def main(path: str) -> None:
    bench = Bench()
    result = {"verbs": verbs(bench)}
    result["interleaved"] = serve(bench, True)
    result["disaggregated"] = serve(bench, False)
    result["page"] = page(bench)
    bench.driver.stop()
    Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])

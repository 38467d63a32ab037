"""A gRPC server on loopback over a real tiny model, and clients that know field numbers only."""

from __future__ import annotations

import contextlib
import functools
import time

import grpc
import jax.numpy as jnp
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

from jaxrl.config import ModelConfig
from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.inference.driver import Driver
from jaxrl.inference.engine import Engine
from jaxrl.models.model import build_model
from jaxrl.serving.backend import Backend
from jaxrl.serving.grpc_server import start_grpc
from jaxrl.weights.digest import stamp

LENGTH = 64
SLOTS = 4
TOKEN = "open sesame"


@functools.cache
def tiny_model(vocab_size: int = 259, max_length: int = LENGTH):
    """(model, weights): two layers, random weights that are large enough to differ by prompt."""
    import jax

    model = build_model(
        ModelConfig(
            n_layers=2,
            d_model=32,
            n_heads=4,
            n_kv_heads=2,
            head_dim=8,
            mlp_dim=64,
            vocab_size=vocab_size,
            max_length=max_length,
        )
    )
    rng = np.random.default_rng(3)

    def leaf(like):
        values = rng.normal(0, 0.3, like.shape) + (len(like.shape) == 1)
        return jnp.array(values.astype(like.dtype))

    return model, jax.tree.map(leaf, model.abstract)


@functools.cache
def tiny_engine() -> Engine:
    """One warm engine for every test of a process."""
    model, params = tiny_model()
    engine = Engine(
        model,
        slots=SLOTS,
        max_length=LENGTH,
        prefill_buckets=(16,),
        steps_per_dispatch=4,
        max_stop_tokens=4,
        top_logprobs=3,
    )
    engine.warm_up(params)
    return engine


def tiny_driver(engine=None, **options) -> Driver:
    """A driver that is not started: version 0 of the tiny model, with the tokenizer `bytes`."""
    params = tiny_model()[1]
    options = {"tokenizer": load_tokenizer("bytes"), **options}
    return Driver(engine or tiny_engine(), params, stamp(params, 0), **options)


@contextlib.asynccontextmanager
async def serving(driver=None, *, token=None, stop_ids=None, servers=None, **options):
    """(backend, channel) of a server, which `servers` (a list) gets too.

    `driver` None: the model is still loading.
    """
    backend = Backend("tiny", **options)
    if driver is not None:
        backend.open(driver, stop_ids=stop_ids)
    server = await start_grpc(backend, "127.0.0.1", 0, token)
    if servers is not None:
        servers.append(server)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield backend, channel
    finally:
        await server.stop(0)


def until(condition) -> None:
    """Waits until the condition holds; fails after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


TYPES = {
    "int32": Field.TYPE_INT32,
    "string": Field.TYPE_STRING,
    "bool": Field.TYPE_BOOL,
    "float": Field.TYPE_FLOAT,
}

OLD_FIELDS = {
    1: "string session_cache",
    3: "int32 priority",
    4: "int32 max_tokens",
    5: "Text text_content",
    6: "Tokens token_content",
}
"""DecodeRequest of the published 0.2.2."""

HEAD_FIELDS = {
    4: "int32 max_tokens",
    5: "Text text_content",
    6: "Tokens token_content",
    7: "Metadata metadata",
    8: "int32 num_samples",
    9: "string lora_adapter_id",
    10: "bool has_bos",
}
"""DecodeRequest of the last development version."""


class Stub:
    """A client made of field numbers alone, as published stubs would be; it knows no field of ours.

    Names of its own are no obstacle: only numbers and types are on the wire.
    """

    def __init__(self, fields: dict[int, str]):
        file = descriptor_pb2.FileDescriptorProto(name="client", package="client", syntax="proto3")
        messages = {
            "Text": {1: "string text"},
            "Tokens": {1: "*int32 token_ids"},
            "Metadata": {1: "float start_time"},
            "Request": fields,
            "Sample": {1: "string text", 2: "*int32 token_ids"},
            "Content": {1: "*Sample samples"},
            "Response": {3: "Content stream_content"},
            "Live": {1: "bool is_live"},
        }
        for name, wanted in messages.items():
            message = file.message_type.add(name=name)
            for number, text in wanted.items():
                kind, field_name = text.lstrip("*").split()
                field = message.field.add(name=field_name, number=number)
                many = text.startswith("*")
                field.label = Field.LABEL_REPEATED if many else Field.LABEL_OPTIONAL
                if kind in TYPES:
                    field.type = TYPES[kind]
                else:
                    field.type, field.type_name = Field.TYPE_MESSAGE, f".client.{kind}"
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(file.SerializeToString())

        def made(name):
            return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"client.{name}"))

        self.Request, self.Response, self.Live = map(made, ("Request", "Response", "Live"))

    def decode(self, channel, request, **call):
        """The call, to be read with `async for`."""
        method = channel.unary_stream(
            "/jetstream_proto.Orchestrator/Decode",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self.Response.FromString,
        )
        return method(request, **call)

    async def is_live(self, channel) -> bool:
        """HealthCheck of JetStream's service."""
        method = channel.unary_unary(
            "/jetstream_proto.Orchestrator/HealthCheck",
            response_deserializer=self.Live.FromString,
        )
        return (await method(b"")).is_live

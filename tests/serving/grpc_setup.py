"""A gRPC server on loopback, and clients that know the numbers of published fields only."""

from __future__ import annotations

import contextlib

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from serving.scripted import ScriptedDriver

from jaxrl.data.tokenizers import load_tokenizer
from jaxrl.serving import protocol
from jaxrl.serving.backend import Backend
from jaxrl.serving.grpc_server import start_grpc
from jaxrl.types import WeightVersion

TOKEN = "open-sesame"
PROMPT = [104, 7, 60, 200, 31]


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


def decode(channel, data: bytes | None = None, /, timeout=None, metadata=None, **fields):
    """The call with the extended messages; `data` in place of a message that was made right."""
    method = channel.unary_stream(
        f"/{protocol.SERVICE}/Decode",
        request_serializer=None,
        response_deserializer=protocol.DecodeResponse.FromString,
    )
    data = protocol.DecodeRequest(**fields).SerializeToString() if data is None else data
    return method(data, timeout=timeout, metadata=metadata)


def ids(*tokens) -> dict:
    return {"token_ids": tokens}


def gathered(responses, index=0, field="token_ids") -> list:
    """One field of one sample, over all responses."""
    found = []
    for response in responses:
        found += getattr(response.stream_content.samples[index], field)
    return found


def scripted(*texts: bytes, versions=None):
    """A driver that decodes these bytes, one chunk each."""
    tokenizer = load_tokenizer("bytes")
    driver = ScriptedDriver(tokenizer, [[3 + b for b in text] for text in texts], versions=versions)
    driver.version = WeightVersion(0, "zero")
    return driver

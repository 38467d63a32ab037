"""JetStream's serving protocol, with fields of our own, as message classes in a private pool.

The messages carry the original names (`jetstream_proto.DecodeRequest`), so that published clients
and server reflection find what they know. A private descriptor pool keeps them apart from those
that the package `google-jetstream` registers: both may live in one process. Field numbers below
1001 are JetStream's, of the published 0.2.2 and of the last development version; from 1001 on they
are ours. `jetstream.proto` beside this file says the same for people who generate stubs.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, unknown_fields
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from google.protobuf.message import DecodeError, Message

from jaxrl.errors import RequestError

PACKAGE = "jetstream_proto"
SERVICE = f"{PACKAGE}.Orchestrator"
FILE = "jaxrl/serving/jetstream.proto"
FIRST_OWN_FIELD = 1001
"""Fields from this number on are ours; JetStream's own are below."""

_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "string": FieldDescriptorProto.TYPE_STRING,
}

_Field = tuple[int, str, str]
"""Number, type, name. The type may begin with `repeated` or `optional`, or with `oneof NAME`."""


def _message(
    name: str,
    *fields: _Field,
    nested: Sequence[DescriptorProto] = (),
    reserved: Sequence[int] = (),
) -> DescriptorProto:
    message = DescriptorProto(name=name, nested_type=nested)
    for number in reserved:
        message.reserved_range.add(start=number, end=number + 1)
    optional = []
    for number, kind, field_name in fields:
        *words, kind = kind.split()
        repeated = words == ["repeated"]
        field = message.field.add(
            name=field_name,
            number=number,
            label=FieldDescriptorProto.LABEL_REPEATED
            if repeated
            else FieldDescriptorProto.LABEL_OPTIONAL,
        )
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
        if words == ["optional"]:
            optional.append(field)
        elif words[:1] == ["oneof"]:
            field.oneof_index = _oneof(message, words[1])
    # What proto3 calls optional is a choice with one member; those come after the real ones.
    for field in optional:
        field.proto3_optional = True
        field.oneof_index = _oneof(message, f"_{field.name}")
    return message


def _oneof(message: DescriptorProto, name: str) -> int:
    names = [choice.name for choice in message.oneof_decl]
    if name not in names:
        message.oneof_decl.add(name=name)
        names.append(name)
    return names.index(name)


def _request() -> DescriptorProto:
    return _message(
        "DecodeRequest",
        (1, "string", "session_cache"),
        (3, "int32", "priority"),
        (4, "int32", "max_tokens"),
        (5, "oneof content DecodeRequest.TextContent", "text_content"),
        (6, "oneof content DecodeRequest.TokenContent", "token_content"),
        (7, "oneof metadata_optional DecodeRequest.Metadata", "metadata"),
        (8, "int32", "num_samples"),
        (9, "string", "lora_adapter_id"),
        (10, "bool", "has_bos"),
        (1001, "optional double", "temperature"),
        (1002, "optional int32", "top_k"),
        (1003, "optional double", "top_p"),
        (1004, "optional int64", "seed"),
        (1005, "repeated string", "stop"),
        (1006, "repeated int32", "stop_token_ids"),
        (1007, "optional double", "timeout_seconds"),
        (1008, "bool", "logprobs"),
        (1009, "int32", "top_logprobs"),
        nested=[
            _message("TextContent", (1, "string", "text")),
            _message("TokenContent", (1, "repeated int32", "token_ids")),
            _message("Metadata", (1, "float", "start_time")),
        ],
        reserved=[2],
    )


def _response() -> DescriptorProto:
    sample = _message(
        "Sample",
        (1, "string", "text"),
        (2, "repeated int32", "token_ids"),
        (1001, "repeated float", "logprobs"),
        (1002, "repeated int32", "weight_versions"),
        (1003, "repeated DecodeResponse.StreamContent.Alternatives", "top_logprobs"),
        (1004, "string", "finish_reason"),
    )
    alternatives = _message(
        "Alternatives", (1, "repeated int32", "token_ids"), (2, "repeated float", "logprobs")
    )
    stream_content = _message(
        "StreamContent",
        (1, "repeated DecodeResponse.StreamContent.Sample", "samples"),
        nested=[sample, alternatives],
    )
    return _message(
        "DecodeResponse",
        (2, "oneof content DecodeResponse.InitialContent", "initial_content"),
        (3, "oneof content DecodeResponse.StreamContent", "stream_content"),
        (1001, "repeated WeightVersion", "weights"),
        (1002, "Usage", "usage"),
        nested=[_message("InitialContent"), stream_content],
        reserved=[1],
    )


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=FILE, package=PACKAGE, syntax="proto3")
    file.message_type.extend(
        [
            _request(),
            _response(),
            _message("WeightVersion", (1, "int64", "number"), (2, "string", "digest")),
            _message("Usage", (1, "int32", "prompt_tokens"), (2, "int32", "completion_tokens")),
            _message("HealthCheckRequest"),
            _message("HealthCheckResponse", (1, "bool", "is_live")),
        ]
    )
    service = file.service.add(name="Orchestrator")
    for method, streams in (("Decode", True), ("HealthCheck", False)):
        service.method.add(
            name=method,
            input_type=f".{PACKAGE}.{method}Request",
            output_type=f".{PACKAGE}.{method}Response",
            server_streaming=streams,
        )
    return file


POOL = descriptor_pool.DescriptorPool()
"""Holds the protocol and nothing else until a server adds what reflection shall tell."""
POOL.AddSerializedFile(_file().SerializeToString())


def _class(name: str) -> type[Message]:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


DecodeRequest = _class("DecodeRequest")
DecodeResponse = _class("DecodeResponse")
HealthCheckRequest = _class("HealthCheckRequest")
HealthCheckResponse = _class("HealthCheckResponse")
WeightVersion = _class("WeightVersion")
Usage = _class("Usage")
StreamContent = _class("DecodeResponse.StreamContent")
Sample = _class("DecodeResponse.StreamContent.Sample")
Alternatives = _class("DecodeResponse.StreamContent.Alternatives")

_CONTENTS = {
    DecodeRequest.DESCRIPTOR.fields_by_name[name].number: name
    for name in ("text_content", "token_content")
}


def parse_request(data: bytes) -> Message:
    """The bytes of a DecodeRequest -> the message. Raises RequestError.

    Refused are bytes that are no such message, and a prompt given twice: protobuf would keep the
    last one and forget the other in silence.
    """
    try:
        request = DecodeRequest.FromString(data)
        # A message without fields keeps everything as unknown, also what a choice has dropped.
        fields = unknown_fields.UnknownFieldSet(HealthCheckRequest.FromString(data))
    except DecodeError as error:
        raise RequestError(f"the bytes are not a {PACKAGE}.DecodeRequest: {error}") from None
    given = {_CONTENTS[field.field_number] for field in fields if field.field_number in _CONTENTS}
    if len(given) != 1:
        found = " and ".join(sorted(given)) or "neither"
        raise RequestError(
            f"the prompt must be one of text_content and token_content; the request has {found}"
        )
    return request

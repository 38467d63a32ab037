"""The messages of the protocol: the file for stubs says the same, and old bytes are read."""

from __future__ import annotations

import subprocess
import sys

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto

from jaxrl.errors import RequestError
from jaxrl.serving import protocol


def _messages(file, prefix="") -> dict:
    """Full name -> all that the wire and the stubs know of a message, in no order."""
    found = {}
    kinds = file.nested_type if isinstance(file, DescriptorProto) else file.message_type
    for message in kinds:
        choices = [choice.name for choice in message.oneof_decl]
        fields = {
            field.number: (
                field.name,
                field.type,
                field.label,
                field.type_name,
                choices[field.oneof_index] if field.HasField("oneof_index") else None,
                field.proto3_optional,
            )
            for field in message.field
        }
        reserved = sorted((span.start, span.end) for span in message.reserved_range)
        name = f"{prefix}.{message.name}"
        found[name] = (fields, reserved)
        found |= _messages(message, name)
    return found


def _services(file) -> dict:
    return {
        (service.name, method.name): (
            method.input_type,
            method.output_type,
            method.client_streaming,
            method.server_streaming,
        )
        for service in file.service
        for method in service.method
    }


def _ours() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    protocol.POOL.FindFileByName(protocol.FILE).CopyToProto(file)
    return file


def test_proto_file_says_what_the_server_speaks(repo_root, tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools compiles the .proto file")
    out = tmp_path / "descriptors"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{repo_root}"]

    subprocess.run(
        [*command, f"--descriptor_set_out={out}", str(repo_root / protocol.FILE)], check=True
    )
    compiled = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]

    assert compiled.package == protocol.PACKAGE
    assert _messages(_ours()) == _messages(compiled)
    assert _services(_ours()) == _services(compiled)


def test_fields_of_jetstream_keep_their_numbers_and_ours_begin_at_1001():
    request = protocol.DecodeRequest.DESCRIPTOR.fields_by_name
    sample = protocol.Sample.DESCRIPTOR.fields_by_name

    theirs = {name: f.number for name, f in request.items() if f.number < 1001}
    assert theirs == {
        "session_cache": 1,
        "priority": 3,
        "max_tokens": 4,
        "text_content": 5,
        "token_content": 6,
        "metadata": 7,
        "num_samples": 8,
        "lora_adapter_id": 9,
        "has_bos": 10,
    }
    assert {name: f.number for name, f in sample.items() if f.number < 1001} == {
        "text": 1,
        "token_ids": 2,
    }
    assert protocol.FIRST_OWN_FIELD == 1001


def test_import_registers_nothing_in_the_pool_that_the_package_uses():
    code = (
        "from google.protobuf import descriptor_pool\n"
        "from jaxrl.serving import protocol\n"
        "descriptor_pool.Default().FindMessageTypeByName('jetstream_proto.DecodeRequest')"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert "KeyError" in result.stderr


# Bytes as an independent writer would put them: field number and wire type, then the value.
MAX_TOKENS_4 = bytes([4 << 3, 4])
TOKENS_7_300 = bytes([6 << 3 | 2, 5, 1 << 3 | 2, 3, 7, 0xAC, 0x02])
TEXT_HI = bytes([5 << 3 | 2, 4, 1 << 3 | 2, 2, *b"hi"])
UNKNOWN_FIELD = bytes([0xF8, 0xFF, 0x03, 1])


def test_request_written_by_hand_is_read():
    request = protocol.parse_request(TOKENS_7_300 + MAX_TOKENS_4 + UNKNOWN_FIELD)

    assert list(request.token_content.token_ids) == [7, 300]
    assert request.max_tokens == 4
    assert not request.HasField("temperature")


def test_optional_field_that_is_zero_differs_from_one_not_given():
    data = protocol.DecodeRequest(text_content={"text": "hi"}, temperature=0.0).SerializeToString()

    request = protocol.parse_request(data)

    assert request.HasField("temperature")
    assert not request.HasField("seed")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (MAX_TOKENS_4, "has neither"),
        (b"", "has neither"),
        (TEXT_HI + TOKENS_7_300, "has text_content and token_content"),
        (TOKENS_7_300 + MAX_TOKENS_4 + TEXT_HI, "has text_content and token_content"),
        (b"\xff\xff\xff", "not a jetstream_proto.DecodeRequest"),
        (bytes([5 << 3 | 2, 4, 1 << 3 | 2, 2, 0xC3, 0x28]), "not a jetstream_proto.DecodeRequest"),
    ],
    ids=["no prompt", "empty", "text and tokens", "tokens and text", "garbage", "not UTF-8"],
)
def test_request_without_exactly_one_prompt_is_refused(data, message):
    with pytest.raises(RequestError, match=message):
        protocol.parse_request(data)

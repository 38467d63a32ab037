"""The gRPC server: errors, deadlines, cancellation, the token, health and reflection."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from inference.gates import Gate
from serving.grpc_setup import (
    HEAD_FIELDS,
    OLD_FIELDS,
    PROMPT,
    TOKEN,
    Stub,
    decode,
    gathered,
    ids,
    scripted,
    serving,
)
from serving.servers import until

from jaxrl.errors import ConfigError
from jaxrl.serving import protocol
from jaxrl.serving.grpc_server import start_grpc

BEARER = (("authorization", f"Bearer {TOKEN}"),)
NAN = float("nan")


@pytest.fixture(scope="module")
def driver(tiny):
    with tiny.driver() as driver:
        yield driver


async def failure(call) -> grpc.aio.AioRpcError:
    """The error that the call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in call]
    return caught.value


TOKENS = {"token_content": ids(*PROMPT)}
BAD_REQUESTS = {
    "no limit": (TOKENS, "max_tokens=0"),
    "negative limit": ({**TOKENS, "max_tokens": -5}, "max_tokens=-5"),
    "huge limit": ({**TOKENS, "max_tokens": 2**31 - 1}, "2147483647"),
    "no prompt": ({"max_tokens": 4}, "has neither"),
    "empty tokens": ({"token_content": ids(), "max_tokens": 4}, "the prompt is empty"),
    "empty text": ({"text_content": {"text": ""}, "max_tokens": 4}, "the prompt is empty"),
    "long prompt": ({"token_content": ids(*[5] * 128), "max_tokens": 4}, "context of 128"),
    "id beyond": (
        {"token_content": ids(5, 9999), "max_tokens": 4},
        "token 9999 at position 1",
    ),
    "negative id": ({"token_content": ids(-1), "max_tokens": 4}, "prompt token -1"),
    "temperature": ({**TOKENS, "max_tokens": 4, "temperature": -1.0}, "temperature=-1.0"),
    "no temperature": ({**TOKENS, "max_tokens": 4, "temperature": NAN}, "temperature=nan"),
    "tiny temperature": ({**TOKENS, "max_tokens": 4, "temperature": 1e-30}, "temperature=1e-30"),
    "top_k": ({**TOKENS, "max_tokens": 4, "top_k": -1}, "top_k=-1"),
    "top_p": ({**TOKENS, "max_tokens": 4, "top_p": 1.5}, "top_p=1.5"),
    "top_p of nothing": ({**TOKENS, "max_tokens": 4, "top_p": 0.0}, "top_p=0.0"),
    "tiny top_p": ({**TOKENS, "max_tokens": 4, "top_p": 1e-300}, "top_p=1e-300"),
    "alternatives": ({**TOKENS, "max_tokens": 4, "top_logprobs": 6}, "top_logprobs=6"),
    "no alternatives": ({**TOKENS, "max_tokens": 4, "top_logprobs": -1}, "top_logprobs=-1"),
    "stop token": ({**TOKENS, "max_tokens": 4, "stop_token_ids": [9999]}, "stop token 9999"),
    "stop tokens": ({**TOKENS, "max_tokens": 4, "stop_token_ids": range(30)}, "stop tokens"),
    "empty stop": ({**TOKENS, "max_tokens": 4, "stop": [""]}, "stop string"),
    "long text": (
        {"text_content": {"text": "a" * 1_000_000}, "max_tokens": 4},
        "text_content has 1000000 characters",
    ),
    "samples": ({**TOKENS, "max_tokens": 4, "num_samples": -1}, "num_samples=-1"),
    "many samples": ({**TOKENS, "max_tokens": 4, "num_samples": 129}, "num_samples=129"),
    "session": ({**TOKENS, "max_tokens": 4, "session_cache": "s"}, "session_cache='s'"),
    "adapter": ({**TOKENS, "max_tokens": 4, "lora_adapter_id": "a"}, "lora_adapter_id='a'"),
    "no time": ({**TOKENS, "max_tokens": 4, "timeout_seconds": 0.0}, "timeout_seconds=0.0"),
    "nan time": ({**TOKENS, "max_tokens": 4, "timeout_seconds": NAN}, "timeout_seconds=nan"),
}


@pytest.mark.asyncio
async def test_request_that_makes_no_sense_is_an_invalid_argument_with_the_value(driver):
    async with serving(driver) as (_, channel):
        errors = {
            name: await failure(decode(channel, **fields))
            for name, (fields, _) in BAD_REQUESTS.items()
        }
        after = [r async for r in decode(channel, **TOKENS, max_tokens=3)]

    for name, (_, message) in BAD_REQUESTS.items():
        assert errors[name].code() == grpc.StatusCode.INVALID_ARGUMENT, (name, errors[name])
        assert message in errors[name].details(), name
    assert gathered(after)
    assert (driver.stats().waiting, driver.stats().running) == (0, 0)


@pytest.mark.asyncio
async def test_prompt_given_twice_and_bytes_that_are_no_message_are_invalid_arguments(tiny, driver):
    tokens = protocol.DecodeRequest(**TOKENS, max_tokens=4).SerializeToString()
    text = protocol.DecodeRequest(text_content={"text": "x"}).SerializeToString()

    async with serving(driver) as (_, channel):
        twice = await failure(decode(channel, tokens + text))
        garbage = await failure(decode(channel, b"\xff\xfe\xfd"))
        no_utf8 = await failure(decode(channel, text.replace(b"x", b"\xff")))

    assert twice.code() == garbage.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "text_content and token_content" in twice.details()
    assert "DecodeRequest" in garbage.details()
    assert no_utf8.code() == grpc.StatusCode.INVALID_ARGUMENT


@contextlib.asynccontextmanager
async def held(tiny, **options):
    """(engine, driver, channel): the first request is in the middle of its completion, held up."""
    engine = Gate(tiny.engine, hold_at=[2])
    with tiny.driver(engine, **options) as driver:
        try:
            async with serving(driver) as (_, channel):
                yield engine, driver, channel
        finally:
            engine.go.set()


async def started(engine, channel, **fields):
    """A call of which some tokens have come, while its second dispatch is held up."""
    call = decode(channel, **{**TOKENS, "max_tokens": 40, "seed": 1, **fields})
    await anext(aiter(call))
    assert await asyncio.to_thread(engine.reached.wait, 60)
    return call


@pytest.mark.asyncio
async def test_full_queue_is_resource_exhausted_and_says_when_to_come_again(tiny):
    async with held(tiny, max_waiting=3) as (engine, driver, channel):
        running = await started(engine, channel)
        # Those that find a slot at once do not count as waiting.
        fitting = 3 + tiny.engine.slots - 1
        waiting = [decode(channel, **TOKENS, max_tokens=2) for _ in range(fitting)]
        await asyncio.to_thread(until, lambda: driver.stats().waiting == fitting)
        error = await failure(decode(channel, **TOKENS, max_tokens=2))
        group = await failure(decode(channel, **TOKENS, max_tokens=2, num_samples=3))
        engine.go.set()
        answers = [[r async for r in call] for call in (running, *waiting)]

    assert error.code() == group.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("grpc-retry-pushback-ms", "1000") in tuple(error.trailing_metadata())
    assert all(gathered(answer) for answer in answers)
    assert (driver.stats().finished, driver.stats().waiting) == (1 + fitting, 0)


@pytest.mark.asyncio
async def test_group_that_the_queue_takes_in_part_leaves_nothing_behind(tiny):
    async with held(tiny, max_waiting=2) as (engine, driver, channel):
        call = await started(engine, channel)
        error = await failure(decode(channel, **TOKENS, max_tokens=2, num_samples=8))
        left = driver.stats().waiting
        call.cancel()

    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert left == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("samples", [1, 3])
async def test_client_that_cancels_frees_the_slots(tiny, samples):
    async with held(tiny) as (engine, driver, channel):
        call = await started(engine, channel, num_samples=samples)
        call.cancel()
        engine.go.set()
        await asyncio.to_thread(until, lambda: driver.stats().running == 0)
        after = [r async for r in decode(channel, **TOKENS, max_tokens=3)]

    assert (driver.stats().cancelled, driver.stats().finished) == (samples, 1)
    assert gathered(after)


@pytest.mark.asyncio
async def test_client_whose_connection_ends_frees_the_slot(tiny):
    async with held(tiny) as (engine, driver, channel):
        call = await started(engine, channel)
        await channel.close()
        engine.go.set()
        await asyncio.to_thread(until, lambda: driver.stats().running == 0)

    assert driver.stats().cancelled == 1
    assert call.done()


@pytest.mark.asyncio
async def test_deadline_of_the_call_ends_it_and_frees_the_slot(tiny):
    async with held(tiny) as (engine, driver, channel):
        error = await failure(decode(channel, **TOKENS, max_tokens=40, timeout=0.3))
        engine.go.set()
        await asyncio.to_thread(until, lambda: driver.stats().running == 0)

    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert driver.stats().finished == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", ["request", "server"])
async def test_time_limit_of_the_request_or_the_server_is_deadline_exceeded(tiny, limit):
    engine = Gate(tiny.engine, hold_at=[2])
    fields = {"timeout_seconds": 0.3} if limit == "request" else {}
    options = {"timeout_s": 0.3} if limit == "server" else {}
    with tiny.driver(engine) as driver:
        async with serving(driver, **options) as (_, channel):
            call = decode(channel, **TOKENS, max_tokens=40, **fields)
            task = asyncio.create_task(failure(call))
            assert await asyncio.to_thread(engine.reached.wait, 60)
            await asyncio.sleep(0.4)
            engine.go.set()
            error = await task
            await asyncio.to_thread(until, lambda: driver.stats().running == 0)

    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "time" in error.details()
    assert driver.stats().expired == 1


@pytest.mark.asyncio
async def test_client_asking_for_more_time_than_the_server_gives_gets_the_servers():
    driver = scripted(b"ab")

    async with serving(driver, timeout_s=5.0) as (_, channel):
        for seconds in (1000.0, 2.0):
            call = decode(channel, **TOKENS, max_tokens=2, timeout_seconds=seconds)
            assert [r async for r in call]

    assert driver.timeouts == [5.0, 2.0]


@pytest.mark.asyncio
async def test_engine_failure_is_an_internal_error_then_and_later(tiny):
    async with held(tiny) as (engine, _, channel):
        call = await started(engine, channel)
        engine.error = RuntimeError("device lost")
        engine.go.set()
        during = await failure(call)
        later = await failure(decode(channel, **TOKENS, max_tokens=2))
        live = await Stub(OLD_FIELDS).is_live(channel)

    assert during.code() == later.code() == grpc.StatusCode.INTERNAL
    assert "device lost" in during.details()
    assert not live


@pytest.mark.asyncio
async def test_server_that_loads_or_drains_is_unavailable_at_once(driver):
    stub = Stub(HEAD_FIELDS)
    async with serving() as (backend, channel):
        loading = await failure(decode(channel, **TOKENS, max_tokens=2))
        live_before = await stub.is_live(channel)
        backend.open(driver)
        answer = [r async for r in decode(channel, **TOKENS, max_tokens=2)]
        live = await stub.is_live(channel)
        backend.draining = True
        draining = await failure(decode(channel, **TOKENS, max_tokens=2))
        live_after = await stub.is_live(channel)

    assert loading.code() == draining.code() == grpc.StatusCode.UNAVAILABLE
    assert "loading" in loading.details()
    assert answer
    assert (live_before, live, live_after) == (False, True, False)


@pytest.mark.asyncio
async def test_standard_health_follows_the_backend(driver):
    kinds = health_pb2.HealthCheckResponse
    async with serving() as (backend, channel):
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(service=""):
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        watch = stub.Watch(health_pb2.HealthCheckRequest(service=protocol.SERVICE))
        seen = [(await watch.read()).status, await check()]
        backend.open(driver)
        seen += [await check(), await check(protocol.SERVICE), (await watch.read()).status]
        backend.draining = True
        seen += [await check(), (await watch.read()).status]
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await check("no.such.Service")

    assert seen == [
        *[kinds.NOT_SERVING] * 2,
        *[kinds.SERVING] * 3,
        *[kinds.NOT_SERVING] * 2,
    ]
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "metadata",
    [
        None,
        (("authorization", TOKEN),),
        (("authorization", f"Bearer {TOKEN}x"),),
        (("authorization", "Bearer "),),
        (("authorization", f"Basic {TOKEN}"),),
        (*BEARER, ("authorization", "Bearer other")),
    ],
    ids=["none", "no scheme", "longer", "empty", "other scheme", "two"],
)
async def test_call_without_the_right_token_is_refused(driver, metadata):
    async with serving(driver, token=TOKEN) as (_, channel):
        error = await failure(decode(channel, **TOKENS, max_tokens=2, metadata=metadata))

    assert error.code() == grpc.StatusCode.UNAUTHENTICATED
    assert TOKEN not in error.details()


@pytest.mark.asyncio
async def test_token_opens_every_call_and_health_needs_none(driver):
    async with serving(driver, token=TOKEN) as (_, channel):
        answer = [r async for r in decode(channel, **TOKENS, max_tokens=2, metadata=BEARER)]
        live = await Stub(OLD_FIELDS).is_live(channel)
        check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

    assert gathered(answer)
    assert live
    assert check.status == health_pb2.HealthCheckResponse.SERVING


def _reflected(port: int):
    """What a reflection client without the .proto finds out (blocking)."""
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = descriptor_pool.DescriptorPool(database)
        services = set(database.get_services())
        service = pool.FindServiceByName("jetstream_proto.Orchestrator")
        decode_method = service.methods_by_name["Decode"]
        fields = {f.name: f.number for f in decode_method.input_type.fields}
        for name in services:
            assert pool.FindServiceByName(name).methods
    return services, fields


@pytest.mark.asyncio
async def test_reflection_lists_and_resolves_every_service(driver):
    servers = []
    async with serving(driver, servers=servers):
        services, fields = await asyncio.to_thread(_reflected, servers[0].port)

    assert services == {
        "jetstream_proto.Orchestrator",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert (fields["max_tokens"], fields["has_bos"], fields["temperature"]) == (4, 10, 1001)


@pytest.mark.asyncio
async def test_reflection_needs_the_token(driver):
    servers = []
    async with serving(driver, token=TOKEN, servers=servers):
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(_reflected, servers[0].port)

    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.asyncio
async def test_port_that_is_taken_is_a_config_error(driver):
    servers = []
    async with serving(driver, servers=servers) as (backend, _):
        with pytest.raises(ConfigError, match=f"127.0.0.1:{servers[0].port}"):
            await start_grpc(backend, "127.0.0.1", servers[0].port, None)


@pytest.mark.asyncio
async def test_stop_lets_running_calls_end_within_its_grace(tiny):
    engine = Gate(tiny.engine, hold_at=[2])
    with tiny.driver(engine) as driver:
        servers = []
        async with serving(driver, servers=servers) as (_, channel):
            call = await started(engine, channel)
            stopping = asyncio.create_task(servers[0].stop(60))
            await asyncio.sleep(0.1)
            engine.go.set()
            rest = [r async for r in call]
            await stopping

    assert rest[-1].stream_content.samples[0].finish_reason == "length"
    assert driver.stats().finished == 1


@pytest.mark.asyncio
async def test_stop_without_grace_ends_running_calls_and_frees_their_slots(tiny):
    engine = Gate(tiny.engine, hold_at=[2])
    with tiny.driver(engine) as driver:
        servers = []
        async with serving(driver, servers=servers) as (_, channel):
            call = await started(engine, channel)
            await servers[0].stop(0)
            error = await failure(call)
        engine.go.set()
        until(lambda: driver.stats().running == 0)

    assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert driver.stats().cancelled == 1

"""What a client of any tier sees, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from paceline.config import ServerConfig
from paceline.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    FieldViolation,
    IncompatiblePeerError,
    InvalidRequestError,
    PeerLostError,
)
from paceline.serving import TierServer, error_from_rpc, open_channel
from paceline.v1 import draft_pb2, draft_pb2_grpc, router_pb2, router_pb2_grpc

ROUTER = "paceline.v1.RouterService"
DRAFT = "paceline.v1.DraftService"


class Tier(router_pb2_grpc.RouterServiceServicer, draft_pb2_grpc.DraftServiceServicer):
    """A tier whose handlers do what the test says; ``generate`` and ``info`` are coroutine functions."""

    def __init__(self):
        self.generate = self.info = self.link = None
        self.seen = []
        self.entered = asyncio.Event()
        self.left = asyncio.Event()

    async def Generate(self, request, context):
        self.seen.append(request)
        self.entered.set()
        try:
            await self.generate(request, context)
        finally:
            self.left.set()

    async def GetServerInfo(self, request, context):
        return await self.info(request, context)

    async def Link(self, request_iterator, context):
        await self.link(request_iterator, context)


@asynccontextmanager
async def running(tier: Tier, drain_s: float = 5.0) -> AsyncIterator[tuple[TierServer, grpc.aio.Channel]]:
    server = TierServer(ServerConfig(port=0, drain_s=drain_s), services=[ROUTER, DRAFT])
    router_pb2_grpc.add_RouterServiceServicer_to_server(tier, server.grpc_server)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(tier, server.grpc_server)
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            yield server, channel
    finally:
        await server.stop(0)


def raising(error):
    async def handler(request, context):
        raise error

    return handler


async def generate(channel, request=None):
    return [
        r
        async for r in router_pb2_grpc.RouterServiceStub(channel).Generate(
            request or router_pb2.GenerateRequest()
        )
    ]


CASES = [
    (
        InvalidRequestError(
            [FieldViolation("sampling.temperature", "-1: >= 0"), FieldViolation("stop[2]", "empty")]
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (ConfigError("no model"), grpc.StatusCode.FAILED_PRECONDITION),
    (IncompatiblePeerError("another tokenizer"), grpc.StatusCode.FAILED_PRECONDITION),
    (CapacityError("queue is full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (PeerLostError("verify is gone", 0.25), grpc.StatusCode.UNAVAILABLE),
    (EngineError("step failed"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), CASES, ids=lambda v: type(v).__name__)
async def test_every_error_arrives_as_its_status_and_is_restored_by_the_caller(error, code):
    """Each error class travels with its code and details, from streaming and unary handlers alike."""
    tier = Tier()
    tier.generate = tier.info = raising(error)
    async with running(tier) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as streaming:
            await generate(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await router_pb2_grpc.RouterServiceStub(channel).GetServerInfo(router_pb2.GetServerInfoRequest())
    for caught in (streaming.value, unary.value):
        assert caught.code() is code
        restored = error_from_rpc(caught)
        assert type(restored) is type(error)
        assert str(restored) == str(error)
        assert getattr(restored, "violations", None) == getattr(error, "violations", None)
        assert getattr(restored, "retry_after_s", None) == getattr(error, "retry_after_s", None)


async def test_bad_utf8_in_a_nested_field_is_named():
    """Bytes that are not UTF-8 answer INVALID_ARGUMENT with the path of the field; the handler never runs."""
    good = router_pb2.GenerateRequest(
        chat=router_pb2.ChatInput(
            messages=[
                router_pb2.ChatMessage(role="system", content="be brief"),
                router_pb2.ChatMessage(role="user", content="caf@"),
            ]
        )
    ).SerializeToString()
    tier = Tier()
    async with running(tier) as (_, channel):
        call = channel.unary_stream(f"/{ROUTER}/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call(good.replace(b"caf@", b"caf\xe9")):
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = error_from_rpc(caught.value).violations
    assert violation.field == "chat.messages[1].content"
    assert "0xe9" in violation.description
    assert not tier.seen


async def test_a_ten_megabyte_prompt_reaches_the_handler():
    """gRPC's own limit of 4 MB does not stand before validation, which can refuse in words."""
    tier = Tier()
    tier.generate = raising(InvalidRequestError.single("text", "too long"))
    async with running(tier) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel, router_pb2.GenerateRequest(text="x" * 10_000_000))
    assert error_from_rpc(caught.value).violations[0].field == "text"
    assert len(tier.seen[0].text) == 10_000_000


async def test_watch_sees_serving_then_not_serving_while_a_stream_in_flight_ends_in_peace():
    """A drain tells health watchers at once, refuses new calls, and lets a stream finish that does so in time."""
    tier, go_on = Tier(), asyncio.Event()

    async def slow(request, context):
        await context.write(router_pb2.GenerateResponse(chunk=router_pb2.GenerateChunk(text="a")))
        await go_on.wait()
        await context.write(router_pb2.GenerateResponse(chunk=router_pb2.GenerateChunk(text="b")))

    tier.generate = slow
    async with running(tier) as (server, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=ROUTER))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stream = asyncio.create_task(generate(channel))
        await tier.entered.wait()
        stopping = asyncio.create_task(server.stop(5))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(channel)
        assert isinstance(error_from_rpc(refused.value), PeerLostError)
        assert not stopping.done()
        go_on.set()
        assert [r.chunk.text for r in await stream] == ["a", "b"]
        await asyncio.wait_for(stopping, 2)
        assert await watch.read() is grpc.aio.EOF


async def test_a_stream_that_outlives_the_drain_is_cut_with_unavailable():
    """After drain_s the handler is cancelled and the client gets one typed error that says to try again."""
    tier = Tier()

    async def forever(request, context):
        await context.write(router_pb2.GenerateResponse())
        await asyncio.Event().wait()

    tier.generate = forever
    stopped = []

    async def after():
        stopped.append(tier.left.is_set())

    async with running(tier) as (server, channel):
        server.on_stop(after)
        stream = asyncio.create_task(generate(channel))
        await tier.entered.wait()
        await server.stop(0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error_from_rpc(caught.value).retry_after_s == 0.5
        assert stopped == [True], "callbacks run after the last handler has left"
        await server.stop()
        assert stopped == [True], "stopping again does nothing again"

"""What a client of any tier sees, over a real socket."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

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


# --- errors nobody foresaw, and those in odd places ---------------------------------------------------------------


async def test_an_unknown_exception_tells_the_client_little_and_the_log_everything_once(caplog):
    """INTERNAL with the trace id and no traceback; one log record holds the exception."""
    tier = Tier()
    tier.generate = raising(ValueError("secret/path.py"))
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with running(tier) as (_, channel):
        stub = router_pb2_grpc.RouterServiceStub(channel)
        metadata = (("traceparent", f"00-{trace}-00f067aa0ba902b7-01"),)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(router_pb2.GenerateRequest(), metadata=metadata):
                pass
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == f"internal error, trace {trace}"
    assert "secret" not in str(caught.value)
    (record,) = caplog.records
    assert record.exc_info[1].args == ("secret/path.py",)
    assert isinstance(error_from_rpc(caught.value), EngineError)


async def test_an_error_inside_a_task_group_is_found():
    """Handlers run one task group a stream; the error raised on purpose is told, not the group around it."""
    tier = Tier()

    async def grouped(request, context):
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(10))
            group.create_task(raising(CapacityError("full", 3))(request, context))

    tier.generate = grouped
    async with running(tier) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel)
    assert error_from_rpc(caught.value).retry_after_s == 3


async def test_an_abort_inside_a_task_group_keeps_its_status(caplog):
    """A handler may answer by itself, with whatever code, from within a task."""
    tier = Tier()

    async def grouped(request, context):
        async with asyncio.TaskGroup() as group:
            group.create_task(context.abort(grpc.StatusCode.DATA_LOSS, "gone"))

    tier.generate = grouped
    async with running(tier) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "gone")
    assert not caplog.records


async def test_a_failed_call_to_the_next_tier_is_passed_on_as_what_it_means():
    """A handler that lets another tier's error through answers with the same error."""
    behind, front = Tier(), Tier()
    behind.generate = raising(InvalidRequestError.single("max_tokens", "0: at least 1"))
    async with running(behind) as (_, inner), running(front) as (_, outer):

        async def forward(request, context):
            await generate(inner)

        front.generate = forward
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(outer)
    assert error_from_rpc(caught.value).violations == (FieldViolation("max_tokens", "0: at least 1"),)


async def test_a_cancel_that_no_client_sent_is_still_answered(caplog):
    """A handler that dies of somebody else's cancelled task ends in one error, not in silence."""
    tier = Tier()

    async def awaits_cancelled(request, context):
        inner = asyncio.create_task(asyncio.sleep(10))
        inner.cancel()
        await inner

    tier.generate = awaits_cancelled
    async with running(tier) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(10):
                await generate(channel)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert len(caplog.records) == 1


@pytest.mark.parametrize("manner", ["plain", "raises while cleaning up", "writes on", "deadline"])
async def test_cancelling_is_normal_and_silent(manner, caplog):
    """A client that leaves, or runs out of time, stops the handler within a moment and leaves no log line."""
    caplog.set_level(logging.INFO)
    tier = Tier()

    async def stream(request, context):
        try:
            while True:
                await context.write(
                    router_pb2.GenerateResponse(chunk=router_pb2.GenerateChunk(text="x" * 1000))
                )
                if manner != "writes on":
                    await asyncio.sleep(0.01)
        finally:
            if manner == "raises while cleaning up":
                raise RuntimeError("while cleaning up")

    tier.generate = stream
    async with running(tier) as (server, channel):
        for _ in range(5):
            tier.left.clear()
            call = router_pb2_grpc.RouterServiceStub(channel).Generate(
                router_pb2.GenerateRequest(), timeout=0.1 if manner == "deadline" else None
            )
            await call.read()
            if manner == "deadline":
                with pytest.raises(grpc.aio.AioRpcError):
                    while await call.read():
                        pass
            else:
                call.cancel()
            await asyncio.wait_for(tier.left.wait(), 2)
        async with asyncio.timeout(10):
            while server.num_in_flight:
                await asyncio.sleep(0.01)
    assert not caplog.records


async def test_a_hundred_long_violations_fit_into_a_status():
    """The trailing metadata of a refusal stays below what any client takes; what was left out is counted."""
    violations = [FieldViolation(f"tokens.ids[{i}]", "ä" * 5000) for i in range(100)]
    tier = Tier()
    tier.generate = raising(InvalidRequestError(violations))
    async with running(tier) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel)
    restored = error_from_rpc(caught.value).violations
    assert restored[0].field == "tokens.ids[0]"
    assert restored[-1].description == f"{100 - (len(restored) - 1)} more violations are not listed"


# --- streams of requests --------------------------------------------------------------------------------------------

HELLO = draft_pb2.LinkRequest(hello=draft_pb2.LinkHello(verify_id="v", vocab_size=9)).SerializeToString()
BAD_HELLO = HELLO.replace(b"v", b"\xff")


@pytest.mark.parametrize("reading", ["iterator", "context"])
async def test_a_malformed_message_of_a_stream_ends_it_unless_the_handler_reads_on(reading):
    """The read that meets bad bytes raises InvalidRequestError naming the field; the next read goes on."""
    tier, seen = Tier(), []

    async def read_all(requests, context):
        while True:
            try:
                request = await (anext(requests) if reading == "iterator" else context.read())
            except InvalidRequestError as error:
                seen.append(error.violations[0].field)
                continue
            except StopAsyncIteration:
                return
            if request is grpc.aio.EOF:
                return
            seen.append(request.hello.verify_id)

    async def careless(requests, context):
        async for request in requests:
            seen.append(request.hello.verify_id)  # noqa: PERF401 - what was read before the error counts

    async with running(tier) as (_, channel):
        for handler in (read_all, careless):
            tier.link = handler
            call = channel.stream_stream(f"/{DRAFT}/Link")()
            for message in (HELLO, BAD_HELLO, HELLO):
                await call.write(message)
            await call.done_writing()
            if handler is read_all:
                assert await call.code() is grpc.StatusCode.OK
                assert seen == ["v", "hello.verify_id", "v"]
                seen.clear()
            else:
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert seen == ["v"]


# --- health, reflection ----------------------------------------------------------------------------------------------


async def test_health_answers_for_the_server_and_each_service():
    """ "" and every service name share one state; an unknown name is NOT_FOUND, or SERVICE_UNKNOWN to a watcher."""
    states = health_pb2.HealthCheckResponse
    async with running(Tier()) as (server, channel):
        health = health_pb2_grpc.HealthStub(channel)
        for serving in (True, False, True):
            server.set_serving(serving)
            for name in ("", ROUTER, DRAFT):
                reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert reply.status == (states.SERVING if serving else states.NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="x.Y"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service="x.Y"))
        assert (await watch.read()).status == states.SERVICE_UNKNOWN


async def test_one_watcher_leaving_does_not_deafen_the_others():
    """Watchers of the same service are independent."""
    async with running(Tier()) as (server, channel):
        health = health_pb2_grpc.HealthStub(channel)
        leaves, stays = (health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
        await leaves.read()
        await stays.read()
        leaves.cancel()
        await asyncio.sleep(0.1)
        server.set_serving(False)
        reply = await asyncio.wait_for(stays.read(), 2)
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_is_enough_for_a_generic_client():
    """`buf curl` finds the services and calls one knowing nothing but the address."""
    tier = Tier()

    async def info(request, context):
        return router_pb2.GetServerInfoResponse(version="7", default_max_tokens=5)

    tier.info = info
    async with running(tier) as (server, _):
        buf = Path(sys.executable).parent / "buf"
        common = (str(buf), "curl", "--http2-prior-knowledge", "--protocol", "grpc")
        outputs = []
        for arguments in (
            ("--list-services", f"http://{server.address}"),
            ("-d", "{}", f"http://{server.address}/{ROUTER}/GetServerInfo"),
        ):
            process = await asyncio.create_subprocess_exec(
                *common, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            out, err = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0, err.decode()
            outputs.append(out.decode())
    assert {ROUTER, DRAFT, "grpc.health.v1.Health"} <= set(outputs[0].split())
    assert json.loads(outputs[1]) == {"version": "7", "defaultMaxTokens": 5}


# --- start and stop -----------------------------------------------------------------------------------------------------


async def test_a_port_that_is_taken_is_a_wrong_setting():
    """Two servers never share a port by chance: the second one says which setting is wrong."""
    async with running(Tier()) as (server, _):
        second = TierServer(ServerConfig(port=server.port), services=[ROUTER])
        with pytest.raises(ConfigError, match=str(server.port)):
            await second.start()
        await second.stop(0)


async def test_a_shorter_stop_shortens_a_drain_and_a_longer_one_does_not_lengthen_it():
    """The second SIGTERM of an impatient operator cuts at once."""
    tier = Tier()

    async def forever(request, context):
        await asyncio.Event().wait()

    tier.generate = forever
    loop = asyncio.get_running_loop()
    async with running(tier) as (server, channel):
        stream = asyncio.create_task(generate(channel))
        await tier.entered.wait()
        begin = loop.time()
        stops = [asyncio.create_task(server.stop(drain_s)) for drain_s in (60, 30, 0.1, 60)]
        await asyncio.gather(*stops, server.wait())
        assert loop.time() - begin < 15  # the other drains are of 30 and 60 s
        with pytest.raises(grpc.aio.AioRpcError):
            await stream


async def test_drain_callbacks_end_streams_that_never_would_and_stop_callbacks_run_last_added_first(caplog):
    """A drain with a long-lived stream is over at once when its owner ends it; a failing callback stops nobody."""
    tier, over, order = Tier(), asyncio.Event(), []

    async def link(requests, context):
        await over.wait()

    async def end_links():
        over.set()

    tier.link = link

    def callback(name, error=None):
        async def run():
            order.append(name)
            if error:
                raise error

        return run

    async with running(tier, drain_s=30) as (server, channel):
        server.on_drain(end_links)
        server.on_stop(callback("engine"))
        server.on_stop(callback("middle", RuntimeError("broken")))
        server.on_stop(callback("links"))
        call = channel.stream_stream(f"/{DRAFT}/Link")()
        async with asyncio.timeout(5):
            while not server.num_in_flight:
                await asyncio.sleep(0.01)
            await server.stop()
        assert await call.code() is grpc.StatusCode.OK
    assert order == ["links", "middle", "engine"]
    assert len(caplog.records) == 1


async def test_stopping_a_server_that_never_started_still_runs_its_callbacks():
    """What was built for a server that could not start is given back."""
    ran = []

    async def callback():
        ran.append(1)

    server = TierServer(ServerConfig(port=0), services=[])
    server.on_stop(callback)
    async with asyncio.timeout(10):
        await server.stop()
        await server.wait()
    assert ran == [1]


async def test_a_handler_that_swallows_its_cancel_cannot_hold_the_server():
    """The end comes within a few seconds of the drain, whatever handlers do."""
    tier, release = Tier(), asyncio.Event()

    async def stubborn(request, context):
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    tier.generate = stubborn
    async with running(tier) as (server, channel):
        stream = asyncio.create_task(generate(channel))
        await tier.entered.wait()
        async with asyncio.timeout(6):
            await server.stop(0)
        release.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await stream

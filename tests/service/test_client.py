"""The typed client against a real server."""

import asyncio
import contextlib
import os
import sys

import pytest
import pytest_asyncio
import scripted_router

from paceline.client import Chunk, Client, Finished, Started, generate_request
from paceline.config import load_config
from paceline.errors import (
    CapacityError,
    EngineError,
    IncompatiblePeerError,
    InvalidRequestError,
    PeerLostError,
)
from paceline.serving import TierServer
from paceline.serving.delay_line import DelayLine
from paceline.types import FinishReason, Mode
from paceline.v1 import router_pb2_grpc

VERIFY = "paceline.v1.VerifyService"


@pytest_asyncio.fixture
async def router():
    server = TierServer(load_config(None, ["router.server.port=0"]).router.server, services=[])
    servicer = scripted_router.ScriptedRouter()
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server.grpc_server)
    await server.start()
    yield server.address, servicer
    await server.stop(0.0)


async def test_a_request_is_started_chunks_finished(router):
    """The events are values of our own types; the figures are those that the server sent."""
    async with Client(router[0]) as client:
        events = [event async for event in client.generate(generate_request(text="x", seed=5))]
    started, *chunks, finished = events
    assert isinstance(started, Started)
    assert (started.request_id, started.plan.drafter, started.seed) == ("req-1", "ngram", 5)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == "Blåbær [x]"
    assert [chunk.round for chunk in chunks] == [None, 0, 1]
    assert isinstance(finished, Finished)
    assert finished.finish_reason is FinishReason.LENGTH
    assert finished.speculative == scripted_router.stats()
    assert finished.timings == scripted_router.TIMINGS


async def test_errors_come_back_as_ours(router):
    """Each kind of failure is its own class, with its details."""
    async with Client(router[0]) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await anext(client.generate(generate_request(text="wrong")))
        assert [one.field for one in caught.value.violations] == ["sampling.temperature", "stop[0]"]
        with pytest.raises(CapacityError):
            await anext(client.generate(generate_request(text="full")))
        with pytest.raises(EngineError):
            _ = [event async for event in client.generate(generate_request(text="broken"))]


async def test_a_stream_without_an_answer_is_an_error(router):
    """A request ends in exactly one answer; silence is not one."""
    async with Client(router[0]) as client:
        with pytest.raises(EngineError, match="without an answer"):
            _ = [event async for event in client.generate(generate_request(text="silent"))]


async def test_nobody_there_is_a_lost_peer():
    """The error names the address that was called."""
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(PeerLostError, match=r"^127\.0\.0\.1:1: nobody listens there$"):
            await client.server_info()


async def test_a_router_far_away_or_busy_is_no_lost_peer(router):
    """Its first words may take a while: the first call waits for them."""
    with DelayLine(router[0], rtt_s=0.6) as line:
        async with Client(line.address) as client:
            assert (await client.server_info()).version


async def test_closing_the_iterator_cancels_the_request(router):
    """The server learns of it at once."""
    address, servicer = router
    async with Client(address) as client:
        async with contextlib.aclosing(client.generate(generate_request(text="forever"))) as events:
            async for event in events:
                if isinstance(event, Chunk) and event.text == "[forever]":
                    break
        await asyncio.wait_for(servicer.cancelled.wait(), 10)


async def test_requests_and_server_info(router):
    """What the router remembers and serves, typed."""
    async with Client(router[0]) as client:
        (request,) = await client.list_requests(limit=1)
        info = await client.server_info()
    assert request.rounds == scripted_router.ROUNDS
    assert request.plan.mode is Mode.SPECULATIVE
    assert info.model == scripted_router.INFO
    assert [(one.name, one.available) for one in info.drafters] == [("ngram", True), ("small", False)]


async def test_another_tier_says_which_one_it_is():
    """The address of the verify tier instead of the router's: said in words."""
    server = TierServer(load_config(None).router.server.model_copy(update={"port": 0}), services=[VERIFY])
    await server.start()
    try:
        async with Client(server.address) as client:
            with pytest.raises(IncompatiblePeerError, match="is the verify tier; requests go to the router"):
                await client.server_info()
            with pytest.raises(IncompatiblePeerError, match="is the verify tier"):
                await anext(client.generate(generate_request(text="x")))
    finally:
        await server.stop(0.0)


async def test_a_router_that_dies_in_mid_stream_is_said_in_plain_words():
    """No words of the transport: the address, and that the connection broke."""
    code = (
        "import asyncio, sys; sys.path.insert(0, 'tests/service')\n"
        "import scripted_router; from paceline.config import load_config\n"
        "async def main():\n"
        "    server = await scripted_router.create_server(load_config(None, ['router.server.port=0']))\n"
        "    await server.start(); print(server.address, flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": "."}
    )
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip()
    async with Client(address) as client:
        with pytest.raises(
            PeerLostError, match=f"{address}: the stream ended half-way, the connection broke"
        ):
            async for event in client.generate(generate_request(text="forever")):
                if isinstance(event, Chunk) and event.text == "[forever]":
                    process.kill()
    await process.wait()

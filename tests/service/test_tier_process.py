"""A tier as a process: what `python -m some_tier` prints, and how it ends."""

import asyncio
import signal
import sys
from contextlib import asynccontextmanager

import grpc
import pytest

from paceline.errors import PeerLostError
from paceline.serving import error_from_rpc, open_channel
from paceline.v1 import router_pb2, router_pb2_grpc

TIER = """
import asyncio
from paceline.errors import EngineError
from paceline.serving.main import run_tier
from paceline.serving.server import TierServer
from paceline.v1 import router_pb2, router_pb2_grpc

class Tier(router_pb2_grpc.RouterServiceServicer):
    async def Generate(self, request, context):
        await context.write(router_pb2.GenerateResponse())
        await asyncio.sleep(float(request.text))
        await context.write(router_pb2.GenerateResponse())

async def create_server(config):
    if config.model.name == "slow":
        print("building", flush=True)
        await asyncio.sleep(60)
    if config.model.name == "broken":
        raise EngineError("the weights are torn")
    server = TierServer(config.router.server, services=["paceline.v1.RouterService"], section="router.server")
    router_pb2_grpc.add_RouterServiceServicer_to_server(Tier(), server.grpc_server)
    async def stopped():
        print("callback ran", flush=True)
    server.on_stop(stopped)
    return server

run_tier("router", create_server)
"""


@asynccontextmanager
async def tier(*arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        TIER,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line_with(process, text):
    async with asyncio.timeout(20):
        while line := (await process.stdout.readline()).decode():
            if text in line:
                return line.strip()
    raise AssertionError(f"no line with {text!r}: {(await process.stderr.read()).decode()}")


async def end(process, within_s=20):
    out, err = await asyncio.wait_for(process.communicate(), within_s)
    return process.returncode, out.decode(), err.decode()


def generate(channel, seconds):
    return router_pb2_grpc.RouterServiceStub(channel).Generate(router_pb2.GenerateRequest(text=str(seconds)))


async def test_a_tier_says_how_it_is_set_and_where_it_listens_and_drains_on_sigterm():
    """SIGTERM: the stream in flight ends well, then the callbacks run, then the process ends with 0."""
    async with tier("--set", "router.server.port=0", "--set", "router.server.drain_s=9") as process:
        await line_with(process, "router.server.drain_s = 9.0")
        address = (await line_with(process, "listening on ")).removeprefix("listening on ")
        async with open_channel(address) as channel:
            call = generate(channel, 0.5)
            await call.read()
            process.send_signal(signal.SIGTERM)
            assert await call.read() is not grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        code, out, err = await end(process)
    assert (code, out) == (0, "callback ran\n")
    assert "msg=draining signal=SIGTERM num_calls=1" in err
    assert "Traceback" not in err


async def test_a_second_signal_cuts():
    """Who asks twice does not wait for the drain; the client is told to try elsewhere."""
    async with tier("--set", "router.server.port=0", "--set", "router.server.drain_s=60") as process:
        address = (await line_with(process, "listening on ")).removeprefix("listening on ")
        async with open_channel(address) as channel:
            call = generate(channel, 60)
            await call.read()
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.3)
            assert process.returncode is None
            process.send_signal(signal.SIGINT)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert isinstance(error_from_rpc(caught.value), PeerLostError)
        code, out, err = await end(process, 5)
    assert (code, out) == (0, "callback ran\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--set", "router.server.prot=1"), 2, "router.server.prot"),
        (("--set", "nonsense"), 2, "expected section.key=value"),
        (("--config", "/nowhere.toml"), 2, "/nowhere.toml"),
        (("--set", "router.server.host=203.0.113.1"), 2, "router.server.port: cannot listen on 203.0.113.1"),
        (("--set", "model.name=broken"), 1, "the weights are torn"),
    ],
)
async def test_what_cannot_start_says_why_in_one_message(arguments, code, words):
    """Wrong settings end with 2, other known reasons with 1; never a traceback."""
    async with tier(*arguments) as process:
        returned, _, err = await end(process)
    assert returned == code, err
    assert words in err
    assert "paceline router: " in err
    assert "Traceback" not in err


async def test_a_signal_while_a_tier_is_still_loading_ends_it_at_once():
    """Nobody waits for a model that is not wanted any more."""
    async with tier("--set", "model.name=slow") as process:
        await line_with(process, "building")
        process.send_signal(signal.SIGTERM)
        code, _, err = await end(process, 5)
    assert code == 0
    assert "Traceback" not in err


async def test_a_tier_that_hangs_is_noticed_by_its_callers():
    """A stopped process keeps its sockets open and says nothing: its streams fail within 25 s, not after minutes."""
    async with tier("--set", "router.server.port=0") as process:
        address = (await line_with(process, "listening on ")).removeprefix("listening on ")
        async with open_channel(address) as channel:
            call = generate(channel, 300)
            await call.read()
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with asyncio.timeout(25):
                    await call.read()
        assert isinstance(error_from_rpc(caught.value), PeerLostError)

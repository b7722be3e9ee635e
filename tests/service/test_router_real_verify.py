"""The router in front of real verify replicas on a tiny model: a lost one changes nothing that the client sees."""

import asyncio
from pathlib import Path

import pytest
import torch
from scripted_verify import ask, running_router

import verify_service.service
from paceline.client import Chunk, Client, generate_request
from paceline.config import load_config
from paceline.serving import TierServer
from paceline.serving.channel import open_channel
from paceline.testing.tiny_models import tiny_model_dir
from paceline.v1 import verify_pb2, verify_pb2_grpc

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


async def verify(model: Path, port: int = 0) -> TierServer:
    # Any port for metrics: the one next to a port of a moment ago may have gone to somebody else meanwhile.
    ports = [f"verify.server.port={port}", "verify.server.metrics_port=0"]
    config = load_config(None, [f'model.name="{model}"', 'model.dtype="float32"', *ports])
    server = await verify_service.service.create_server(config)
    await server.start()
    return server


REQUEST = {
    "text": "The riders take turns",
    "max_tokens": 700,  # long enough not to end before a replica is gone
    "temperature": 1.0,
    "seed": 11,
    "ignore_eos": True,
}


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.2, "frequency_penalty": 0.5}])
@pytest.mark.parametrize("lost_after", [1, 7])
async def test_the_output_is_that_of_an_undisturbed_run(model: Path, lost_after: int, extra: dict) -> None:
    """Sampled, also with penalties over tokens that another replica committed (I2, I7)."""
    first, second = await verify(model), await verify(model)
    try:
        async with running_router([first.address, second.address], f'model.name="{model}"') as client:
            undisturbed = await ask(client, **REQUEST, **extra)
            ids, text, resumed = await disturbed(client, [first, second], lost_after, **REQUEST, **extra)
    finally:
        await first.stop(0)
        await second.stop(0)
    assert ids == undisturbed.ids
    assert text == undisturbed.text
    assert resumed == 1


async def disturbed(client: Client, servers: list[TierServer], lost_after: int, **request):
    """One request whose replica is cut off after so many chunks."""
    chunks: list[Chunk] = []
    event = None
    async for event in client.generate(generate_request(**request), timeout_s=60):
        if isinstance(event, Chunk):
            chunks.append(event)
            if len(chunks) == lost_after:
                await (await busy_one(servers)).stop(0)
    ids = [token for chunk in chunks for token in chunk.token_ids]
    return ids, "".join(chunk.text for chunk in chunks), event.resumed


async def busy_one(servers: list[TierServer]) -> TierServer:
    for server in servers:
        async with open_channel(server.address) as channel:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            if (await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())).num_running:
                return server
    raise AssertionError("none of them decodes")


async def test_a_replica_that_comes_back_on_its_port_goes_on(model: Path) -> None:
    """A new process with the same weights: the journal is all it needs."""
    server = await verify(model)
    port = server.port
    try:
        async with running_router([server.address], f'model.name="{model}"') as client:
            undisturbed = await ask(client, **REQUEST)
            task = asyncio.create_task(disturbed(client, [server], 5, **REQUEST))
            while not server.draining:
                await asyncio.sleep(0.005)
            await server.wait()
            server = await verify(model, port)
            ids, text, resumed = await task
            info = await client.server_info()
    finally:
        await server.stop(0)
    assert ids == undisturbed.ids
    assert text == undisturbed.text
    assert resumed == 1
    assert info.running == 0

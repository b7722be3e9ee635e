"""What models take of their devices, told by the verify tier: what the memory gate goes by."""

import pytest
from stack import load_config_with, running_stack, stack_config

from cluster.simulated import simulated
from paceline.config import load_config
from paceline.serving.channel import open_channel
from paceline.testing.tiny_models import tiny_model_dir
from paceline.v1 import verify_pb2, verify_pb2_grpc


async def info(address: str) -> verify_pb2.GetModelInfoResponse:
    async with open_channel(address) as channel:
        return await verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo(verify_pb2.GetModelInfoRequest())


@pytest.mark.parametrize("compiler", [True, False])
async def test_real_models_say_their_weights_and_their_kv(compiler, tmp_path, monkeypatch):
    """Layers x (keys and values) x heads x size x bytes a token; drafters that hold nothing are not listed.

    A machine without a compiler starts and tells the same.
    """
    if not compiler:
        monkeypatch.setenv("PACELINE_NO_COMPILER", "1")
    target = tiny_model_dir(tmp_path / "target")
    config = load_config_with(stack_config(target, target), verify={"kv_slots": 2})
    async with running_stack(config) as stack:
        found = await info(stack.verify.address)
    assert found.memory.weights_bytes > 10_000
    assert found.memory.device_bytes > 100 * found.memory.weights_bytes
    assert found.memory.kv_bytes_per_token % 4 == 0
    drafters = {one.name: one for one in found.drafter_memory}
    assert {"model", "self"} <= set(drafters)
    assert "random" not in drafters
    assert drafters["self"].weights_bytes == found.memory.weights_bytes
    assert drafters["self"].kv_bytes_per_token == found.memory.kv_bytes_per_token
    assert drafters["self"].shared


async def test_a_simulated_pair_has_the_sizes_of_its_table():
    """16 GB and 128 KiB a token on a device of 24 GB, 2.5 GB for the drafter."""
    ports = ["draft.server.port=0", "verify.server.port=0", "router.server.port=0", "simulation.time_scale=0"]
    async with running_stack(load_config(None, [*simulated("8b+1b"), *ports])) as stack:
        found = await info(stack.verify.address)
    assert (found.memory.device_bytes, found.memory.kv_bytes_per_token) == (24 * 10**9, 131_072)
    (drafter,) = found.drafter_memory
    assert (drafter.weights_bytes, drafter.shared) == (25 * 10**8, True)

"""Memory pressure: higher priority takes a running sequence's memory, and the output of both is what it is alone."""

import asyncio
from pathlib import Path

import pytest
from stack import running_stack, stack_config

from paceline.serving.channel import open_channel
from paceline.v1 import verify_pb2, verify_pb2_grpc

PROMPT = "The riders take turns at the front of the line"


@pytest.mark.parametrize("extra", [{}, {"drafter": "model", "k": 3}])
async def test_giving_way_costs_time_and_no_token(pair: tuple[Path, Path], extra: dict) -> None:
    """Two slots, two long requests, then three urgent ones: all finish with their own tokens."""
    async with running_stack(stack_config(*pair, ["verify.kv_slots=2"])) as stack:

        def request(i: int) -> dict:
            return {"text": f"{i} {PROMPT}", "max_tokens": 900, "temperature": 0.8, "seed": i, **extra}

        alone = [await stack.generate(**request(i), tenant="alone") for i in range(2)]
        long = [asyncio.create_task(stack.generate(**request(i))) for i in range(2)]
        async with asyncio.timeout(10), open_channel(stack.verify.address) as channel:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            while (await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())).num_running < 2:
                await asyncio.sleep(0.005)
        urgent = await asyncio.gather(
            *(
                stack.generate(text=PROMPT, max_tokens=20, temperature=0.0, priority=5, **extra)
                for _ in range(3)
            )
        )
        assert not all(task.done() for task in long)
        answers = await asyncio.gather(*long)
        async with open_channel(stack.verify.address) as channel:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            state = await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())
    assert state.preemptions >= 1
    assert state.num_running == state.num_waiting == 0
    assert state.kv_slots_free == 2
    for answer, expected in zip(answers, alone, strict=True):
        assert answer.token_ids == expected.token_ids
        timings = answer.finished.timings
        parts = timings.draft_s + timings.network_s + timings.wait_s + timings.verify_s
        assert parts == pytest.approx(timings.decode_s, rel=0.05)
    assert len({tuple(answer.token_ids) for answer in urgent}) == 1


async def test_equal_priority_waits(pair: tuple[Path, Path]) -> None:
    """Nobody gives way to an equal: the third request starts when a slot is free."""
    async with running_stack(stack_config(*pair, ["verify.kv_slots=1"])) as stack:
        first, second = await asyncio.gather(
            *(stack.generate(text=f"{i} {PROMPT}", max_tokens=60, temperature=0.0) for i in range(2))
        )
        assert max(first.finished.timings.queue_s, second.finished.timings.queue_s) > 0.01
        async with open_channel(stack.verify.address) as channel:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            assert (await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())).preemptions == 0

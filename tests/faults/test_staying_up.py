"""FAULTS.md, "Staying up", as far as one process can show it; kills of real processes are in tests/cluster."""

import asyncio
import gc
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from stack import Stack, load_config_with, running_stack, stack_config

import draft_service.service
from paceline.client import Chunk, generate_request
from paceline.types import Mode
from paceline.v1 import verify_pb2, verify_pb2_grpc

PROMPT = "The riders take turns at the front of the line"
DRAFTERS = ["ngram", "model", "cascade", "random"]


async def verify_state(stack: Stack) -> verify_pb2.GetModelInfoResponse:
    from paceline.serving.channel import open_channel

    async with open_channel(stack.verify.address) as channel:
        return await verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo(verify_pb2.GetModelInfoRequest())


async def test_32_streams_20_cancelled_leave_nothing_behind(pair: tuple[Path, Path]) -> None:
    """Mixed plans, cut at random moments by the client: the others are right, all memory is back within 2 s."""
    dice = random.Random(7)
    async with running_stack(stack_config(*pair)) as stack:

        def request(i: int) -> dict:
            extra = {"drafter": DRAFTERS[i // 4 % len(DRAFTERS)], "k": 1 + i % 6} if i % 4 else {}
            return {"text": f"{i} {PROMPT}", "max_tokens": 150, "temperature": 0.9, "seed": i, **extra}

        async def cut(i: int) -> None:
            # Long enough that they cannot end by themselves in time.
            message = generate_request(
                **request(i) | {"max_tokens": 900}, mode=Mode.SPECULATIVE if i % 4 else Mode.PLAIN
            )
            stream = stack.client.generate(message)
            until = asyncio.get_running_loop().time() + 2 * dice.random()
            async for _ in stream:
                if asyncio.get_running_loop().time() > until:
                    break
            await stream.aclose()

        whole = [stack.generate(**request(i)) for i in range(12)]
        answers, *_ = await asyncio.gather(asyncio.gather(*whole), *(cut(i) for i in range(12, 32)))
        async with asyncio.timeout(2):
            while True:
                state = await verify_state(stack)
                if not state.num_running and state.kv_slots_free == state.kv_slots:
                    break
                await asyncio.sleep(0.02)
        for i in range(0, 12, 4):
            alone = await stack.generate(**request(i))
            assert answers[i].token_ids == alone.token_ids
        assert (await stack.client.server_info()).running == 0


@pytest.mark.parametrize("drafter", ["ngram", "model", "cascade"])
async def test_the_draft_tier_stops_in_mid_stream_and_comes_back(
    pair: tuple[Path, Path], drafter: str
) -> None:
    """I7: no error, no missing or repeated token; used again when it is back."""
    async with running_stack(stack_config(*pair)) as stack:
        request = {"text": PROMPT, "max_tokens": 900, "temperature": 0.8, "seed": 5}
        plain = await stack.generate(**request)
        running = asyncio.create_task(stack.generate(**request, drafter=drafter, k=2))
        async with asyncio.timeout(10):
            while not (await verify_state(stack)).num_running:
                await asyncio.sleep(0.002)
        port = stack.draft.port
        await stack.draft.stop(0)
        assert not running.done()
        config = load_config_with(
            stack.config, draft={"server": stack.config.draft.server.model_copy(update={"port": port})}
        )
        again = await draft_service.service.create_server(config)
        await again.start()
        try:
            answer = await running
            assert answer.token_ids == plain.token_ids
            async with asyncio.timeout(10):
                while not all(d.available for d in (await verify_state(stack)).drafters):
                    await asyncio.sleep(0.05)
            later = await stack.generate(text=PROMPT, max_tokens=40, temperature=0.0, drafter="model", k=3)
            assert later.finished.speculative.num_accepted_draft_tokens > 0
        finally:
            await again.stop(0)


@pytest.mark.parametrize("drafter", ["", "ngram", "model"])
async def test_hundreds_of_requests_leave_nothing_behind(
    pair: tuple[Path, Path], drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain or speculative, every other one cancelled: of no class of ours are there more objects afterwards."""
    monkeypatch.setattr(draft_service.mirror, "MAX_CLOSED", 16)
    many, streams = 200, 8
    plan = {"mode": Mode.SPECULATIVE, "drafter": drafter, "k": 3} if drafter else {"mode": Mode.PLAIN}
    async with running_stack(stack_config(*pair, ["router.keep_requests=16"])) as stack:

        async def one(number: int) -> None:
            prompt = [5 + (31 * number + 7 * i) % 400 for i in range(12 + number % 9)]
            message = generate_request(
                token_ids=prompt, max_tokens=6, temperature=0.8, seed=number, tenant=f"t{number % 5}", **plan
            )
            events = stack.client.generate(message)
            async for event in events:
                if number % 2 and isinstance(event, Chunk):
                    break
            await events.aclose()

        async def requests(first: int) -> Counter[str]:
            numbers = iter(range(first, first + many))

            async def stream() -> None:
                for number in numbers:
                    await one(number)

            await asyncio.gather(*(stream() for _ in range(streams)))
            async with asyncio.timeout(10):
                while (await verify_state(stack)).num_running or (await stack.client.server_info()).running:
                    await asyncio.sleep(0.02)
            gc.collect()
            return Counter(str(type(one)) for one in gc.get_objects())

        before = await requests(0)
        after = await requests(many)
        ours = re.compile(r"<class '(paceline|router|verify_service|draft_service|_asyncio)\.")
        assert not {
            name: count - before[name]
            for name, count in after.items()
            if ours.match(name) and count - before[name] > many // 6
        }

"""Clients that leave, deadlines, and what the router remembers."""

import asyncio
import logging

import grpc
import pytest
from scripted_verify import Script, ask, pair, running_router, scripted_verify, tokenizer

from paceline.client import Chunk, Client, Finished, generate_request
from paceline.errors import PeerLostError
from paceline.serving.channel import open_channel
from paceline.types import Mode
from paceline.v1 import router_pb2, router_pb2_grpc

IDS = tokenizer().encode("one two three four five six seven eight " * 4)


async def until_idle(verify, *, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while verify.servicer.active:
            await asyncio.sleep(0.01)


async def leave_after(client: Client, num_chunks: int) -> None:
    events = client.generate(generate_request(text="x", max_tokens=100))
    seen = 0
    async for event in events:
        seen += isinstance(event, Chunk)
        if seen == num_chunks:
            break
    await events.aclose()


async def test_a_client_that_leaves_ends_the_decoding_soon_and_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """20 streams cut in the middle: the verify tier is rid of them within 2 s, nobody complains."""
    async with pair(Script(output=IDS, delay_s=0.02)) as (client, verify):
        await ask(client, max_tokens=1)
        with caplog.at_level(logging.INFO):
            await asyncio.gather(*(leave_after(client, 1 + i % 5) for i in range(20)))
            await until_idle(verify, within_s=2)
            async with asyncio.timeout(10):
                while (await client.server_info()).running:
                    await asyncio.sleep(0.01)
        summaries = await client.list_requests(limit=100)
        after = await ask(client, max_tokens=3)
    assert [s.outcome for s in summaries] == ["CANCELLED"] * 20 + ["length"]
    assert after.ids == IDS[:3]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], caplog.text


async def test_a_client_that_leaves_while_the_verify_tier_is_silent_is_noticed_too() -> None:
    """No write would tell."""
    async with pair(Script(output=IDS, delay_s=30)) as (client, verify):
        task = asyncio.create_task(ask(client, max_tokens=5))
        while not verify.servicer.active:
            await asyncio.sleep(0.01)
        task.cancel()
        await until_idle(verify, within_s=2)
        (summary,) = await client.list_requests()
    assert summary.outcome == "CANCELLED"


async def test_a_client_that_hangs_up_on_the_answer_was_answered() -> None:
    """Not cancelled: it read the last message. The same numbers are remembered as were sent."""
    async with pair(Script(output=IDS)) as (client, _):
        for _ in range(10):
            events = client.generate(generate_request(text="x", max_tokens=3))
            async for event in events:
                if isinstance(event, Finished):
                    break
            await events.aclose()
            (summary,) = await client.list_requests(limit=1)
            assert summary.outcome == "length"
            assert summary.timings == event.timings


async def test_the_callers_deadline_goes_on_to_the_verify_tier() -> None:
    """And ends the request there as well, with the code that says so."""
    async with pair(Script(output=IDS, delay_s=0.2)) as (client, verify):
        async with open_channel(client.address) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            call = stub.Generate(router_pb2.GenerateRequest(text="x", max_tokens=50), timeout=0.7)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_idle(verify, within_s=2)
        assert verify.servicer.deadlines[0] is not None
        assert verify.servicer.deadlines[0] <= 0.7
        async with asyncio.timeout(10):
            while not (summaries := await client.list_requests()):
                await asyncio.sleep(0.01)
        assert [s.outcome for s in summaries] == ["DEADLINE_EXCEEDED"]


async def test_without_a_deadline_none_is_made_up() -> None:
    """The router adds no limit of its own."""
    async with pair(Script(output=IDS)) as (client, verify):
        async for _ in client.generate(generate_request(text="x", max_tokens=2)):
            pass
    assert verify.servicer.deadlines == [None]


async def test_the_last_requests_are_remembered_newest_first_without_their_text() -> None:
    """A ring of the configured size; by id and with a limit on request."""
    script = Script(output=IDS, run_lengths=(3,), k=2)
    async with pair(script, "router.keep_requests=3") as (client, _):
        for i in range(5):
            await ask(client, text="secret words", request_id=f"r{i}", max_tokens=7)
        everything = await client.list_requests()
        one = await client.list_requests(request_id="r3")
        newest = await client.list_requests(limit=1)
        async with open_channel(client.address) as channel:
            raw = await router_pb2_grpc.RouterServiceStub(channel).ListRequests(
                router_pb2.ListRequestsRequest()
            )
    assert [s.request_id for s in everything] == ["r4", "r3", "r2"]
    assert [s.request_id for s in one] == ["r3"]
    assert [s.request_id for s in newest] == ["r4"]
    assert one[0].outcome == "length"
    assert one[0].usage.completion_tokens == 7
    assert [r.committed for r in one[0].rounds] == [3, 3]
    assert b"secret" not in raw.SerializeToString()


async def test_the_server_says_what_it_serves() -> None:
    """Model, drafters of all replicas, task types, defaults."""
    async with (
        scripted_verify(Script(output=IDS, drafters=[("ngram", False), ("small", True)])) as one,
        scripted_verify(Script(output=IDS, drafters=[("ngram", True)])) as other,
        running_router([one.address, other.address], "router.default_max_tokens=77") as client,
    ):
        info = await client.server_info()
    assert info.model.name == "tiny"
    assert [(d.name, d.available) for d in info.drafters] == [("ngram", True), ("small", True)]
    assert info.default_max_tokens == 77
    assert len(info.task_types) == 13
    assert info.running == 0


async def test_a_drafter_that_went_away_stays_known() -> None:
    """Asking for it is no error: rounds are plain until it is back."""
    script = Script(output=IDS, drafters=[("ngram", True)])
    async with pair(script) as (client, verify):
        await ask(client, mode=Mode.SPECULATIVE, drafter="ngram", max_tokens=2)
        verify.script.drafters = []
        async with asyncio.timeout(5):
            while any(d.available for d in (await client.server_info()).drafters):
                await asyncio.sleep(0.05)
        answer = await ask(client, mode=Mode.SPECULATIVE, drafter="ngram", max_tokens=2)
        automatic = await ask(client, task_type="extraction", max_tokens=40)
    assert answer.started.plan.mode is Mode.SPECULATIVE
    assert automatic.started.plan.mode is Mode.PLAIN
    assert "not available now" in automatic.started.plan.reason


async def test_a_router_without_any_replica_says_so() -> None:
    """UNAVAILABLE, when to try again, and whom it asked."""
    async with running_router(["127.0.0.1:9"]) as client:
        with pytest.raises(PeerLostError, match=r"127\.0\.0\.1:9"):
            await ask(client, max_tokens=1)
        with pytest.raises(PeerLostError):
            await client.server_info()

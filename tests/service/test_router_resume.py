"""A verify replica is lost in mid-stream: the request goes on elsewhere, without gap or repeat (I7)."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import grpc
import pytest
from scripted_verify import (
    Break,
    Script,
    ask,
    pair,
    running_router,
    scripted_verify,
    tokenizer,
    tokenizer_dir,
)

from paceline.client import Chunk, generate_request
from paceline.errors import CapacityError, EngineError, PeerLostError
from paceline.types import FinishReason

IDS = tokenizer().encode("one two three four five six seven eight")
N = len(IDS)

LOST = {
    "unavailable": Break(4),
    "inside a block": Break(3),
    "a silent end": Break(4, silent=True),
    "cancelled by the server": Break(4, code=grpc.StatusCode.CANCELLED),
    "a broken transport": Break(4, error=PeerLostError("server is shutting down")),
    "before the first token": Break(0),
}


@pytest.mark.parametrize("how", LOST)
async def test_a_broken_stream_goes_on_at_the_next_position(how: str) -> None:
    """The same replica comes back: same text and ids, counted as resumed, the journal sent as committed_ids."""
    async with pair(Script(output=IDS, run_lengths=(2,), breaks=[LOST[how]])) as (client, verify):
        answer = await ask(client, max_tokens=N)
    assert answer.ids == IDS
    assert answer.text == tokenizer().decode(IDS)
    assert answer.finished.resumed == 1
    first, second = verify.servicer.requests
    assert not first.committed_ids
    assert list(second.committed_ids) == IDS[: len(second.committed_ids)]
    assert len(second.committed_ids) >= LOST[how].after
    assert (second.max_tokens, second.prompt_ids) == (first.max_tokens, first.prompt_ids)
    assert second.sampling == first.sampling
    assert list(second.identity) == list(first.identity)
    assert first.identity


async def test_rounds_count_on_and_times_add_up_over_replicas() -> None:
    """Round indices do not start again; both replicas' rounds are in the sums."""
    async with pair(Script(output=IDS, run_lengths=(2,), k=1, breaks=[Break(5)])) as (client, _):
        answer = await ask(client, max_tokens=N)
    indices = [chunk.round for chunk in answer.chunks if chunk.round is not None]
    assert indices == list(range(len(indices)))
    assert answer.finished.speculative.num_rounds == len(indices)
    assert answer.finished.timings.queue_s == 0.25  # what comes after the first token is decode time
    assert answer.finished.timings.draft_s >= len(indices) - 1


async def test_another_replica_takes_over() -> None:
    """The lost one stays away."""
    async with (
        scripted_verify(Script(output=IDS, delay_s=0.02)) as one,
        scripted_verify(Script(output=IDS, delay_s=0.02)) as other,
        running_router([one.address, other.address]) as client,
    ):
        task = asyncio.create_task(ask(client, max_tokens=N))
        while not (one.servicer.active or other.servicer.active):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        busy = one if one.servicer.active else other
        await busy.stop()
        answer = await task
    assert answer.ids == IDS
    assert answer.finished.resumed == 1
    assert len(one.servicer.requests) == len(other.servicer.requests) == 1


async def test_a_killed_process_is_waited_for_until_it_is_back() -> None:
    """kill -9 in mid-stream, a new process on the same port."""

    async def spawn(port: int) -> tuple[asyncio.subprocess.Process, int]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("scripted_verify.py")),
            str(tokenizer_dir()),
            str(port),
            *map(str, IDS),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert process.stdout is not None
        return process, int(await process.stdout.readline())

    process, port = await spawn(0)
    try:
        async with running_router([f"127.0.0.1:{port}"]) as client:
            seen: list[Chunk] = []
            killed = False
            async for event in client.generate(generate_request(text="x", max_tokens=N), timeout_s=60):
                if isinstance(event, Chunk):
                    seen.append(event)
                if len(seen) == 3 and not killed:
                    killed = True
                    process.send_signal(signal.SIGKILL)
                    await process.wait()
                    process, _ = await spawn(port)
            assert [token for chunk in seen for token in chunk.token_ids] == IDS
            assert event.resumed == 1
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_nobody_comes_back_within_the_limit() -> None:
    """One answer all the same: UNAVAILABLE with a time to try again."""
    script = Script(output=IDS, delay_s=0.02)
    async with pair(script, "router.resume_s=0.6") as (client, verify):
        task = asyncio.create_task(ask(client, max_tokens=N))
        while not verify.servicer.active:
            await asyncio.sleep(0.01)
        started = time.monotonic()
        await verify.stop()
        with pytest.raises(PeerLostError):
            await task
        assert 0.5 < time.monotonic() - started < 15  # the default is 30 s
        (summary,) = await client.list_requests()
    assert summary.outcome == "UNAVAILABLE"


async def test_a_request_that_kills_replica_after_replica_is_given_up() -> None:
    """Three in a row without a token: the request itself may be the cause."""
    async with pair(Script(output=IDS, breaks=[Break(0)] * 10)) as (client, verify):
        with pytest.raises(PeerLostError, match="given up"):
            await ask(client, max_tokens=N)
    assert len(verify.servicer.requests) == 3


async def test_an_engine_that_answers_with_its_own_fault_is_not_asked_again() -> None:
    """INTERNAL from a living replica is the answer."""
    script = Script(output=IDS, breaks=[Break(2, error=EngineError("a step failed"))])
    async with pair(script) as (client, verify):
        with pytest.raises(EngineError, match="a step failed"):
            await ask(client, max_tokens=N)
    assert len(verify.servicer.requests) == 1


async def test_internal_made_up_by_the_transport_is_a_lost_replica() -> None:
    """It carries no status of ours."""
    async with pair(Script(output=IDS, breaks=[Break(2, code=grpc.StatusCode.INTERNAL, transport=True)])) as (
        client,
        _,
    ):
        answer = await ask(client, max_tokens=N)
    assert answer.ids == IDS


@pytest.mark.parametrize("request_", [{"max_tokens": 4}, {"max_tokens": N, "stop_token_ids": [IDS[3]]}])
async def test_a_break_after_the_last_token_is_no_loss(request_: dict) -> None:
    """The output is complete: nothing is decoded twice, nothing behind an end."""
    script = Script(output=IDS, breaks=[Break(4)], ignores_limits=True)
    async with pair(script) as (client, verify):
        answer = await ask(client, **request_)
    assert answer.ids == IDS[:4]
    assert answer.finished.resumed == 0
    assert len(verify.servicer.requests) == 1
    expected = FinishReason.STOP if "stop_token_ids" in request_ else FinishReason.LENGTH
    assert answer.finished.finish_reason is expected


async def test_a_full_replica_sends_the_request_to_the_other_one() -> None:
    """Only when all are full does the client hear of it."""
    full = Break(-1, error=CapacityError("queue is full", retry_after_s=0.7))
    async with (
        scripted_verify(Script(output=IDS, breaks=[full] * 2)) as one,
        scripted_verify(Script(output=IDS, breaks=[full] * 1)) as other,
        running_router([one.address, other.address]) as client,
    ):
        with pytest.raises(CapacityError, match="queue is full") as caught:
            await ask(client, max_tokens=N)
        assert caught.value.retry_after_s == 0.7
        answer = await ask(client, max_tokens=N)
        assert answer.ids == IDS
        assert answer.finished.resumed == 0


async def test_a_full_replica_is_waited_for_by_a_request_that_has_begun() -> None:
    """Its tokens are out already: refusing it now would waste them."""
    full = Break(-1, error=CapacityError("queue is full", retry_after_s=0.05))
    async with pair(Script(output=IDS, breaks=[Break(3), full, full])) as (client, _):
        answer = await ask(client, max_tokens=N)
    assert answer.ids == IDS
    assert answer.finished.resumed == 1


async def test_a_request_never_goes_on_with_another_model() -> None:
    """Other weights would give other tokens."""
    async with (
        scripted_verify(Script(output=IDS, delay_s=0.02, num_running=0)) as one,
        scripted_verify(Script(output=IDS, model_fingerprint="other", num_running=50)) as other,
        running_router([one.address, other.address], "router.resume_s=0.5") as client,
    ):
        task = asyncio.create_task(ask(client, max_tokens=N))
        while not one.servicer.active:
            await asyncio.sleep(0.01)
        await one.stop()
        with pytest.raises(PeerLostError):
            await task
        assert not other.servicer.requests


async def test_requests_go_to_the_least_loaded_replica() -> None:
    """Also counting what other routers have there."""
    async with (
        scripted_verify(Script(output=IDS, num_running=9)) as busy,
        scripted_verify(Script(output=IDS, delay_s=0.05)) as idle,
        running_router([busy.address, idle.address]) as client,
    ):
        await asyncio.gather(*(ask(client, max_tokens=4) for _ in range(6)))
    assert (len(busy.servicer.requests), len(idle.servicer.requests)) == (0, 6)

"""A rollout through a real router and its ledger on disk: it grows, outlives a restart, and falls when the tail breaks.

The verify replica is scripted: it says itself how long decoding took, so nothing hangs on this machine's pace.
"""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
from scripted_verify import RunningVerify, Script, ScriptedVerify, running_router

import router.ledger.keeper
import router.ledger.memory
from paceline import codec
from paceline.client import Finished, generate_request
from paceline.types import FinishReason, SpeculativeStats, Timings
from paceline.v1 import common_pb2, router_pb2, verify_pb2

TOKENS = 30
SETTINGS = (
    'router.rollout.gate="on"',
    "router.rollout.window=10",
    "router.rollout.steps=[0.5, 1.0]",
    "router.holdout=0.2",
)


class TimedVerify(ScriptedVerify):
    """All tokens at once; plain ones took 20 ms each, drafted ones 12, or 50 in one request of ``slow_every``."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.slow_every = 0
        self.dice = random.Random(1)

    async def _decode(self, request, context) -> None:
        drafted = request.plan.mode == common_pb2.DECODING_MODE_SPECULATIVE
        gap_s = 0.012 if drafted else 0.020
        if drafted and self.slow_every and self.dice.random() < 1 / self.slow_every:
            gap_s = 0.050
        gap_s *= self.dice.uniform(0.95, 1.05)
        admitted = verify_pb2.DecodeAdmitted(queue_s=0.0)
        run = verify_pb2.DecodeRun(position=len(request.prompt_ids), token_ids=range(10, 10 + TOKENS))
        timings = Timings(0.0, 0.01, gap_s * (TOKENS - 1))
        finished = verify_pb2.DecodeFinished(
            finish_reason=codec.finish_to_pb(FinishReason.LENGTH),
            timings=codec.timings_to_pb(timings),
            speculative=codec.stats_to_pb(SpeculativeStats()),
        )
        for event in ({"admitted": admitted}, {"run": run}, {"finished": finished}):
            await context.write(verify_pb2.DecodeResponse(**event))


@asynccontextmanager
async def timed_verify():
    running = RunningVerify(Script(drafters=(("ngram", True),)))
    running.servicer = TimedVerify(running.script)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


async def send(client, number: int) -> None:
    request = generate_request(text="Hello", task_type="code", max_tokens=TOKENS, request_id=f"r{number}")
    async for event in client.generate(request, timeout_s=60):
        if isinstance(event, Finished):
            return


async def send_until(client, first: int, limit: int, share: float) -> int:
    """Requests, eight at a time, until the rollout has that share; the number of the next one."""
    for number in range(first, first + limit, 8):
        await asyncio.gather(*(send(client, number + i) for i in range(8)))
        await asyncio.sleep(0.05)
        told = (await client.rollout()).rollouts
        if told and told[0].share == share:
            return number + 8
    raise AssertionError(f"{share:.0%} was not reached within {limit} requests: {told}")


async def test_a_rollout_grows_over_a_restart_and_falls_when_its_tail_breaks(tmp_path, monkeypatch):
    """From a passed check to all requests within 400, the router restarted on the way; then one request in five takes 2.5
    times as long as plain while the mean stays even: back at nothing within 1,200, and plain from then on."""
    monkeypatch.setattr(router.ledger.keeper, "STEP_S", 0.05)
    monkeypatch.setattr(router.ledger.memory, "EXCHANGE_S", 0.05)
    settings = (*SETTINGS, f'router.ledger.path="{tmp_path / "ledger.sqlite"}"')
    async with timed_verify() as verify:
        async with running_router([verify.address], *settings) as client:
            passed = router_pb2.RolloutOrder(task="code", action=router_pb2.ROLLOUT_ACTION_PASSED)
            await client.set_rollout([passed])
            number = await send_until(client, 0, 80, 0.5)
            await asyncio.gather(*(send(client, number + i) for i in range(8)))
            number += 8
        async with running_router([verify.address], *settings) as client:
            number = await send_until(client, number, 400 - number, 1.0)
            verify.servicer.slow_every = 5
            number = await send_until(client, number, 1200, 0.0)
            told = await client.rollout()
            assert told.rollouts[0].stage == "stopped"
            assert "the tail is broken" in told.rollouts[0].reason
            assert [record.kind for record in told.audit][:1] == ["rollout"]
        async with running_router([verify.address], *settings) as client:
            await asyncio.sleep(0.3)
            before = len(verify.servicer.requests)
            await send(client, number)
            assert verify.servicer.requests[before].plan.mode == common_pb2.DECODING_MODE_PLAIN
            assert (await client.rollout()).rollouts[0].share == pytest.approx(0.0)

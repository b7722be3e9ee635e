"""Rollouts over the wire: what checks and operators say is carried out, shown, and obeyed by the next plan."""

import asyncio
import time

import pytest
from scripted_verify import Script, ask, pair

from cluster.rollout_cli import status_lines
from paceline.client import Client
from paceline.errors import InvalidRequestError
from paceline.types import Mode
from paceline.v1 import router_pb2

IDS = list(range(10, 60))
DRAFTER = (("ngram", True),)


async def until(client: Client, stage: str) -> router_pb2.GetRolloutResponse:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        told = await client.rollout()
        if [one.stage for one in told.rollouts] == [stage]:
            return told
        await asyncio.sleep(0.05)
    raise AssertionError(f"no {stage}: {told}")


async def test_a_passed_check_lets_a_task_in_and_an_operator_stops_it():
    """Gate in force: plain before; then the canary's share; after a stop plain again. Status says it in words."""
    async with pair(Script(output=IDS, drafters=DRAFTER), 'router.rollout.gate="on"') as (client, _):
        before = await ask(client, task_type="code", max_tokens=40)
        assert before.started.plan.mode is Mode.PLAIN
        assert "unchecked" in before.started.plan.reason
        passed = router_pb2.RolloutOrder(
            task="code", action=router_pb2.ROLLOUT_ACTION_PASSED, note="check of 280"
        )
        await client.set_rollout([passed])
        told = await until(client, "canary")
        assert (told.gated, told.rollouts[0].drafter, told.rollouts[0].share) == (True, "ngram", 0.1)
        words = "\n".join(status_lines(told))
        assert "code with ngram: canary, 10% speculate" in words
        assert "check of 280" in words
        allow = router_pb2.RolloutOrder(task="code", action=router_pb2.ROLLOUT_ACTION_ALLOW)
        await client.set_rollout([allow])
        await until(client, "override")
        after = await ask(client, task_type="code", max_tokens=40)
        assert after.started.plan.mode is Mode.SPECULATIVE
        await client.set_rollout(
            [router_pb2.RolloutOrder(task="code", action=router_pb2.ROLLOUT_ACTION_STOP)]
        )
        await until(client, "stopped")
        assert (await ask(client, task_type="code", max_tokens=40)).started.plan.mode is Mode.PLAIN


async def test_wrong_orders_are_refused_in_words():
    """Every wrong field with its place."""
    async with pair(Script(output=IDS, drafters=DRAFTER)) as (client, _):
        with pytest.raises(InvalidRequestError) as caught:
            await client.set_rollout([router_pb2.RolloutOrder(task="poetry", drafter="x", share=2)])
        assert {v.field for v in caught.value.violations} == {
            "orders[0].action",
            "orders[0].task",
            "orders[0].drafter",
            "orders[0].share",
        }
        with pytest.raises(InvalidRequestError):
            await client.set_rollout([])
        stop = router_pb2.RolloutOrder(task="code", action=router_pb2.ROLLOUT_ACTION_STOP)
        with pytest.raises(
            InvalidRequestError, match="201; expected 1 to 200"
        ):  # more would push the first ones out
            await client.set_rollout([stop] * 201)
        stop.note = 1025 * "n"
        with pytest.raises(InvalidRequestError, match="1025 characters"):
            await client.set_rollout([stop])
        assert "gate is off" in "\n".join(status_lines(await client.rollout()))


async def test_an_order_for_no_drafter_in_particular_needs_one():
    """Where no drafter is known, the usual one is none: the order would be for nobody."""
    async with pair(Script(output=IDS, drafters=())) as (client, _):
        allow = router_pb2.RolloutOrder(task="code", action=router_pb2.ROLLOUT_ACTION_ALLOW)
        with pytest.raises(InvalidRequestError) as caught:
            await client.set_rollout([allow])
        assert [v.field for v in caught.value.violations] == ["orders[0].drafter"]

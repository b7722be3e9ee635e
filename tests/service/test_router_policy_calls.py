"""The policy over the wire: decisions in replies, rules at run time, a ledger that two routers share."""

import asyncio
import math
import sqlite3
import time
from collections.abc import Iterator

import grpc
import pytest
from scripted_verify import Script, ask, pair, router_config, running_router, scripted_verify

import router.policy_service
import router.service
from cluster.decision_words import explained
from cluster.policy_words import in_words, ledger_in_words, rule_in_words
from paceline.client import Client, Started, generate_request
from paceline.config import RouterConfig, load_config
from paceline.errors import InvalidRequestError, PeerLostError
from paceline.serving.channel import error_from_rpc
from paceline.testing.servers import running_server
from paceline.types import Mode
from paceline.v1 import ledger_pb2, ledger_pb2_grpc, router_pb2
from router.ledger.remote import _SHAPE
from router.ledger.service import create_server
from router.ledger.sums import AT, FIELDS
from router.lot import drawn

IDS = list(range(10, 60))
PLAIN = router_pb2.POLICY_ACTION_PLAIN
DRAFTER = (("ngram", True),)
DRAWN = next(name for name in map(str, range(100)) if drawn(name, "holdout", 0.5, RouterConfig().holdout_key))


async def test_the_decision_stands_in_reply_and_list():
    """Arm, origin of the task, what was looked at; `paceline explain` says it in words."""
    async with pair(Script(output=IDS, drafters=DRAFTER, k=3, run_lengths=(3,))) as (client, _):
        answer = await ask(client, task_type="code", max_tokens=40, request_id="r1", tenant="acme")
        decision = answer.started.decision
        assert (decision.arm, decision.task_origin) == ("auto", "named by the request")
        assert decision.considered
        (summary,) = await client.list_requests(request_id="r1")
        assert summary.decision == decision
        words = "\n".join(explained(summary))
        for part in (
            "request r1 of tenant acme",
            "named by the request",
            "speculative with ngram",
            "because: code repeats",
        ):
            assert part in words
        classified = await ask(client, text="Translate to German: good morning", max_tokens=40)
        assert classified.started.task_type == "translation"
        assert (classified.started.decision.task_confidence or 0) > 0.5


@pytest.mark.parametrize(
    ("settings", "fields", "words"),
    [
        (["router.holdout=0.5"], {"request_id": DRAWN}, "Chance decided: a small share"),
        ([], {"max_tokens": 5}, "For this very request the router expects no gain"),
        (["router.plans={code={mode='plain'}}"], {}, "An operator's rule or router.plans says so."),
    ],
)
async def test_who_wonders_why_nothing_was_drafted_is_told(settings, fields, words):
    """By lot, too short, by a rule: what it means and what to say instead; who asked for plain decoding knows."""
    async with pair(Script(output=IDS, drafters=DRAFTER), *settings) as (client, _):
        await ask(client, **{"task_type": "code", "max_tokens": 40, "request_id": "r1"} | fields)
        await ask(client, task_type="code", max_tokens=40, request_id="r2", mode=Mode.PLAIN)
        await ask(client, task_type="code", max_tokens=40, request_id="r3", mode=Mode.SPECULATIVE)
        said = {}
        for name in (fields.get("request_id", "r1"), "r2", "r3"):
            (summary,) = await client.list_requests(request_id=name)
            said[name] = next((line for line in explained(summary) if "that means: " in line), "")
        mine, *others = said.values()
        assert words in mine
        assert "To speculate all the same: --speculative, or --k N." in mine
        assert others == ["", ""]


async def test_rules_at_run_time_are_obeyed_shown_and_removed():
    """Set, seen in the next plan, in the audit, and gone again; a request's own wish stands above."""
    async with pair(Script(output=IDS, drafters=DRAFTER)) as (client, _):
        rules = await client.set_policy_rule(
            router_pb2.PolicyRule(task="code", action=PLAIN, note="incident 7")
        )
        assert [rule_in_words(rule) for rule in rules] == ["task code: plain (incident 7)"]
        ruled = await ask(client, task_type="code", max_tokens=40)
        assert (ruled.started.plan.mode, ruled.started.decision.arm) == (Mode.PLAIN, "pinned")
        wished = await ask(client, task_type="code", max_tokens=40, mode=Mode.SPECULATIVE)
        assert wished.started.plan.mode is Mode.SPECULATIVE
        shown = "\n".join(in_words(await client.policy()))
        assert "plain for task 'code': incident 7" in shown
        assert not await client.remove_policy_rule(task="qa")
        assert await client.remove_policy_rule(task="code")
        assert not await client.remove_policy_rule(task="code")
        assert not await client.remove_policy_rule()
        audit = (await client.policy()).audit
        assert [(one.subject, one.words) for one in audit] == [
            ("task 'code'", "removed"),
            ("task 'code'", "plain for task 'code': incident 7"),
        ]
        free = await ask(client, task_type="code", max_tokens=40)
        assert free.started.plan.mode is Mode.SPECULATIVE


async def test_wrong_rules_are_refused_in_words():
    """Every wrong field named."""
    async with pair(Script(output=IDS)) as (client, _):
        with pytest.raises(InvalidRequestError) as caught:
            await client.set_policy_rule(router_pb2.PolicyRule(task="poetry", drafter="x", k=9, action=PLAIN))
        assert {v.field for v in caught.value.violations} == {"rule.task", "rule.drafter", "rule.k"}


async def test_rules_that_all_routers_would_have_to_carry_are_bounded(monkeypatch):
    """A note is no file: what is longer than names and notes are, or no line of text, is refused; so is one rule too many."""
    async with pair(Script(output=IDS)) as (client, _):
        for wrong in ({"tenant": 129 * "t"}, {"note": 1025 * "n"}, {"note": "a\x1b[2J"}, {"drafter": "a\nb"}):
            rule = router_pb2.PolicyRule(action=router_pb2.POLICY_ACTION_SPECULATIVE, **wrong)
            with pytest.raises(InvalidRequestError) as caught:
                await client.set_policy_rule(rule)
            assert [v.field for v in caught.value.violations] == [f"rule.{name}" for name in wrong]
        monkeypatch.setattr(router.policy_service, "_MOST_RULES", 2)
        for tenant in ("a", "b", "b"):
            await client.set_policy_rule(router_pb2.PolicyRule(tenant=tenant, action=PLAIN))
        with pytest.raises(InvalidRequestError, match="3 rules; at most 2"):
            await client.set_policy_rule(router_pb2.PolicyRule(tenant="c", action=PLAIN))


async def test_user_types_and_rules_name_the_task():
    """By tenant and metadata, from the settings; a type of the user's is known everywhere."""
    settings = (
        'router.task_types=["invoices"]',
        'router.task_rules=[{task="invoices", metadata={app="billing"}}]',
    )
    async with pair(Script(output=IDS), *settings) as (client, _):
        other = await ask(client, max_tokens=2)
        assert other.started.task_type != "invoices"
        request = generate_request(text="x", max_tokens=2, metadata={"app": "billing"})
        events = [event async for event in client.generate(request)]
        assert isinstance(events[0], Started)
        assert events[0].task_type == "invoices"
        named = await ask(client, task_type="invoices", max_tokens=2)
        assert named.started.task_type == "invoices"
        assert "invoices" in (await client.server_info()).task_types


async def test_what_a_ledger_goes_on_from_is_said(tmp_path):
    """New at first; after a restart so many requests since when; after a long pause what was decided is still there."""
    path = tmp_path / "ledger.sqlite"
    setting = f'router.ledger.path="{path}"'
    async with scripted_verify(Script(output=IDS, drafters=DRAFTER)) as verify:
        async with running_router([verify.address], setting) as client:
            assert ledger_in_words(await client.policy()) == f"{path}; new, no requests yet"
            for _ in range(3):
                await ask(client, max_tokens=3)
        async with running_router([verify.address], setting) as client:
            words = ledger_in_words(await client.policy())
            assert words.startswith(f"{path}; 3 requests since 20")
            assert f"ledger: {words}" in list(in_words(await client.policy()))
            await client.set_policy_rule(router_pb2.PolicyRule(task="qa", action=PLAIN))
        with sqlite3.connect(path) as db:
            db.execute("DELETE FROM sums")
        db.close()
        async with running_router([verify.address], setting) as client:
            words = ledger_in_words(await client.policy())
            assert "no requests of the last eight days, but what was decided before" in words


async def test_two_routers_share_a_ledger(tmp_path):
    """What one served and an operator told it, the other knows."""
    path = tmp_path / "ledger.sqlite"
    config = router_config([], f'router.ledger.path="{path}"')
    async with (
        scripted_verify(Script(output=IDS, drafters=DRAFTER, k=3, run_lengths=(3,))) as verify,
        running_server(create_server, config) as ledger,
        running_router([verify.address], f'router.ledger.endpoint="{ledger}"') as a,
        running_router([verify.address], f'router.ledger.endpoint="{ledger}"') as b,
    ):
        for _ in range(3):
            await ask(a, task_type="code", max_tokens=40)
        await a.set_policy_rule(router_pb2.PolicyRule(task="qa", action=PLAIN))
        async with asyncio.timeout(20):
            while not (await b.policy()).rules:
                await asyncio.sleep(0.05)
        assert [rule.task for rule in (await b.policy()).rules] == ["qa"]
        assert (await a.policy()).audit[0].subject == "task 'qa'"
        answer = await ask(b, task_type="qa", max_tokens=40)
        assert answer.started.decision.arm == "pinned"
    assert path.exists()


async def test_a_ledger_that_is_away_is_said_and_survived():
    """Nobody listens there: requests are answered, rules cannot be set, and the policy says so."""
    async with (
        scripted_verify(Script(output=IDS, drafters=DRAFTER)) as verify,
        running_router([verify.address], 'router.ledger.endpoint="127.0.0.1:9"') as client,
    ):
        answer = await ask(client, task_type="code", max_tokens=40)
        assert answer.started.plan.mode is Mode.SPECULATIVE
        assert "away" in (await client.policy()).ledger
        with pytest.raises(PeerLostError, match="ledger"):
            await client.set_policy_rule(router_pb2.PolicyRule(task="code", action=PLAIN))


async def test_what_was_learnt_outlives_the_router(tmp_path):
    """Rules and sums are there again after a restart."""
    setting = f'router.ledger.path="{tmp_path / "ledger.sqlite"}"'
    async with scripted_verify(Script(output=IDS, drafters=DRAFTER, k=3, run_lengths=(3,))) as verify:
        config = router_config([verify.address], setting)
        async with running_server(router.service.create_server, config) as address, Client(address) as client:
            await ask(client, task_type="code", max_tokens=40)
            await client.set_policy_rule(router_pb2.PolicyRule(task="chat", action=PLAIN))
        async with running_server(router.service.create_server, config) as address, Client(address) as client:
            async with asyncio.timeout(20):
                while not (await client.policy()).rules:
                    await asyncio.sleep(0.05)
            assert [rule.task for rule in (await client.policy()).rules] == ["chat"]


async def test_a_shared_ledger_refuses_what_it_could_not_count_or_read():
    """By the field's name; afterwards it answers everybody as before."""
    config = load_config(None, ["router.ledger.server.port=0", "router.ledger.server.metrics_port=off"])
    async with (
        running_server(create_server, config) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        group = ledger_pb2.LedgerGroup(values=["code", "", "ngram", "1", "coupled", "0", "1", "auto"])
        good = ledger_pb2.LedgerUpdate(group=group, at=1e9, sums=[0] * len(FIELDS))
        bad = [good.__deepcopy__() for _ in range(5)]
        bad[0].at, bad[1].at = math.nan, 1e300
        bad[2].sums.append(1)
        bad[3].group.values[-1] = "none"
        del bad[4].group.values[0]
        asked = [
            stub.Exchange(
                ledger_pb2.ExchangeRequest(source="s", batch=1, updates=[one], fields=_SHAPE), timeout=5
            )
            for one in bad
        ]
        asked.append(
            stub.PutDocument(ledger_pb2.PutDocumentRequest(name="rollout_orders", value="{"), timeout=5)
        )
        for call in asked:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT, raised.value
        taken = await stub.Exchange(
            ledger_pb2.ExchangeRequest(source="s", batch=1, updates=[good], fields=_SHAPE), timeout=5
        )
        assert len(taken.rows) == 2


GROUP = ledger_pb2.LedgerGroup(values=["code", "", "ngram", "1", "coupled", "0", "1", "auto"])


def _sums(**values: int) -> list[int]:
    return [values.get(name, 0) for name in FIELDS]


def _odd_sums(now: float) -> Iterator[tuple[str, ledger_pb2.ExchangeRequest]]:
    """What a peer that counts wrongly might send, and the field that is to be named."""

    def exchange(**changed: object) -> ledger_pb2.ExchangeRequest:
        update = ledger_pb2.LedgerUpdate(group=GROUP, at=now, sums=_sums(requests=3))
        request = ledger_pb2.ExchangeRequest(source="odd", batch=1, fields=_SHAPE)
        for name, value in changed.items():
            if hasattr(request, name):
                setattr(request, name, value)
            elif isinstance(value, list):
                update.ClearField(name)  # type: ignore[arg-type]
                getattr(update, name).extend(value)
            else:
                setattr(update, name, value)
        request.updates.append(update)
        return request

    timed = [ledger_pb2.LedgerBin(metric="ttft", number=5, requests=1)]
    yield "batch", exchange(batch=2**64 - 1)
    yield "source", exchange(source="")
    yield "source", exchange(source="x" * 10_000)
    yield "updates[0].at", exchange(at=now + 3e8)
    yield "updates[0].sums", exchange(sums=_sums(drafted=-1))
    yield "updates[0].sums", exchange(sums=_sums(decode_ns=2**63 - 1))
    yield "updates[0].sums", exchange(sums=_sums(requests=2**60))
    yield "updates[0].bins", exchange(bins=[ledger_pb2.LedgerBin(metric="ttft", number=2**30, requests=1)])
    yield "updates[0].bins", exchange(bins=[ledger_pb2.LedgerBin(metric="x" * 99, number=1, requests=1)])
    yield "updates", exchange(bins=timed * 4)
    yield "updates", exchange(bins=[ledger_pb2.LedgerBin(metric="ttft", number=5, requests=2**63)])
    long = exchange()
    long.updates[0].group.values[3] = "1" * 100_000
    yield "updates[0].group", long
    many = exchange()
    many.updates.extend([ledger_pb2.LedgerUpdate()] * 100_000)
    yield "updates", many


async def test_one_routers_odd_sums_are_nobody_elses_trouble():
    """Refused by the field's name and nothing of them kept; the others' sums reach the disk before and after."""
    config = load_config(None, ["router.ledger.server.port=0", "router.ledger.server.metrics_port=off"])
    async with (
        running_server(create_server, config) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        for batch, (field, odd) in enumerate(_odd_sums(time.time()), start=1):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Exchange(odd, timeout=10)
            refused = error_from_rpc(raised.value)
            assert isinstance(refused, InvalidRequestError)
            assert [violation.field for violation in refused.violations] == [field], refused
            good = ledger_pb2.LedgerUpdate(group=GROUP, at=time.time(), sums=_sums(requests=1))
            taken = await stub.Exchange(
                ledger_pb2.ExchangeRequest(source="good", batch=batch, updates=[good], fields=_SHAPE),
                timeout=5,
            )
            hours = [row for row in taken.rows if row.span == 3600]
            assert sum(row.sums[AT["requests"]] for row in hours) == batch
        for name in ("guard", "anything"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.PutDocument(ledger_pb2.PutDocumentRequest(name=name, value="[]"), timeout=5)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT

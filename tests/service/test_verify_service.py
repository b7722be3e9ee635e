"""The verify replica over a real socket, linked to draft replicas that misbehave."""

import asyncio
import gc
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_draft import Asked, ScriptedDraft, proposals, refusal, scripted_draft

import verify_service.service
from paceline import codec
from paceline.config import load_config
from paceline.errors import CapacityError, InvalidRequestError
from paceline.serving.channel import error_from_rpc, open_channel
from paceline.testing.tiny_models import tiny_model_dir
from paceline.types import Plan, SamplingParams
from paceline.v1 import common_pb2, draft_pb2, verify_pb2, verify_pb2_grpc

torch.set_num_threads(1)
Stub = Any  # VerifyServiceAsyncStub, which only type checkers know
PROMPT = [70, 71, 72, 73]
SPECULATIVE = Plan.speculative("scripted", 4, "test", k_fixed=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def verify(model: Path, *settings: str) -> AsyncIterator[Stub]:
    """Patient: what is counted here does not depend on how busy the machine is. ``settings`` come last."""
    patient = ["verify.draft_wait_s=5.0", "verify.draft_wait_least_s=5.0"]
    config = load_config(
        None,
        [
            f'model.name="{model}"',
            'model.dtype="float32"',
            "verify.server.port=0",
            "draft.drafters={scripted={kind='random'}}",  # nothing is looked up beside the target
            *patient,
            *settings,
        ],
    )
    server = await verify_service.service.create_server(config)
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            stub: Stub = verify_pb2_grpc.VerifyServiceStub(channel)
            stub.channel, stub.server = channel, server
            yield stub
    finally:
        await server.stop(0)


@asynccontextmanager
async def linked(model: Path, servicer: ScriptedDraft, *settings: str) -> AsyncIterator[Stub]:
    async with (
        scripted_draft(servicer) as endpoint,
        verify(model, f"verify.draft_endpoints=['{endpoint}']", *settings) as stub,
    ):
        await until_available(stub)
        yield stub


async def until_available(stub: Stub, available: bool = True) -> None:
    async with asyncio.timeout(10):
        while True:
            info = await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())
            if any(d.available for d in info.drafters) == available:
                return
            await asyncio.sleep(0.02)


def request(
    plan: Plan, *, max_tokens: int = 30, prompt: Sequence[int] = PROMPT, **extra
) -> verify_pb2.DecodeRequest:
    extra.setdefault("sampling", codec.sampling_to_pb(SamplingParams(temperature=0.0)))
    return verify_pb2.DecodeRequest(
        request_id="r",
        prompt_ids=prompt,
        max_tokens=max_tokens,
        plan=codec.plan_to_pb(plan),
        **extra,
    )


async def decode(
    stub: Stub, message: verify_pb2.DecodeRequest
) -> tuple[list[int], list[common_pb2.RoundRecord], verify_pb2.DecodeFinished]:
    ids: list[int] = []
    rounds = []
    async for response in stub.Decode(message, timeout=30):
        if response.HasField("run"):
            assert response.run.position == len(message.prompt_ids) + len(message.committed_ids) + len(ids)
            ids += response.run.token_ids
            if response.run.HasField("round"):
                rounds.append(response.run.round)
        elif response.HasField("finished"):
            return ids, rounds, response.finished
    raise AssertionError("no answer")


@pytest.fixture
async def plain_ids(model: Path) -> list[int]:
    async with verify(model) as stub:
        return (await decode(stub, request(Plan.plain("test"))))[0]


def wrong(asked: Asked) -> draft_pb2.Proposal:
    return asked.proposal(*[5] * asked.k)


MALFORMED = {
    "stale base": lambda a: [proposals(a.proposal(5, base_len=len(a.tokens) - 1))],
    "old epoch": lambda a: [proposals(a.proposal(5, epoch=0))],
    "future epoch": lambda a: [proposals(a.proposal(5, epoch=9))],
    "ahead of the truth": lambda a: [proposals(a.proposal(5, base_len=len(a.tokens) + 3))],
    "unknown sequence": lambda a: [proposals(a.proposal(5, sequence_id=777))],
    "too many tokens": lambda a: [proposals(a.proposal(*[5] * (a.k + 1)))],
    "outside the vocabulary": lambda a: [proposals(a.proposal(4_000_000_000))],
    "nothing": lambda a: [],
    "empty message": lambda a: [draft_pb2.LinkResponse()],
    "second welcome": lambda a: [draft_pb2.LinkResponse(welcome=draft_pb2.LinkWelcome(draft_id="y"))],
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_whatever_a_drafter_says_the_tokens_are_those_of_plain(
    model: Path, plain_ids: list[int], name: str
) -> None:
    """Malformed answers cost one bounded wait, then the breaker opens; tokens and finish are untouched."""
    servicer = ScriptedDraft(MALFORMED[name])
    async with linked(model, servicer, "verify.draft_wait_s=0.02") as stub:
        ids, rounds, finished = await decode(stub, request(SPECULATIVE))
    assert ids == plain_ids
    assert all(r.drafted == 0 for r in rounds)
    assert finished.speculative.num_late_rounds >= 1
    assert finished.speculative.num_unavailable_rounds > 0  # nobody waits again, then the breaker is open
    assert servicer.questions > 0


async def test_wrong_guesses_and_duplicates_change_nothing(model: Path, plain_ids: list[int]) -> None:
    """Every block is rejected, every answer comes twice."""
    servicer = ScriptedDraft(lambda a: [proposals(wrong(a), wrong(a)), proposals(wrong(a))])
    async with linked(model, servicer) as stub:
        ids, _, finished = await decode(stub, request(SPECULATIVE))
    assert ids == plain_ids
    assert finished.speculative.num_draft_tokens > 60


async def test_an_oracle_is_accepted_in_full(model: Path, plain_ids: list[int]) -> None:
    """Right guesses are all accepted: 30 tokens in 1 prefill and 6 rounds of up to 5."""

    def oracle(a: Asked) -> list[draft_pb2.LinkResponse]:
        at = len(a.tokens) - len(PROMPT)
        return [proposals(a.proposal(*plain_ids[at : at + a.k]))]

    async with linked(model, ScriptedDraft(oracle)) as stub:
        ids, rounds, finished = await decode(stub, request(SPECULATIVE))
    assert ids == plain_ids
    assert len(rounds) == 6
    assert finished.speculative.draft_acceptance_rate == 1.0


async def test_random_answers_of_every_kind(model: Path, plain_ids: list[int]) -> None:
    """A drafter that mixes right, wrong, broken, late and doubled answers and refusals at random."""
    dice = random.Random(1)
    kinds = list(MALFORMED.values())

    def reply(a: Asked) -> list[draft_pb2.LinkResponse]:
        at = len(a.tokens) - len(PROMPT)
        good = proposals(a.proposal(*plain_ids[at : at + dice.randint(0, a.k)]))
        what = dice.random()
        if what < 0.4:
            return [good]
        if what < 0.5:
            return [refusal(a, draft_pb2.REFUSAL_REASON_OUT_OF_SYNC)]
        return [*dice.choice(kinds)(a), *([good] * dice.randint(0, 2))]

    async with linked(model, ScriptedDraft(reply), "verify.draft_wait_s=0.02") as stub:
        for _ in range(10):
            ids, rounds, _ = await decode(stub, request(SPECULATIVE))
            assert ids == plain_ids
            assert all(r.accepted + r.ignored <= r.drafted for r in rounds)


async def test_a_broken_entry_harms_only_its_own_sequence(model: Path, plain_ids: list[int]) -> None:
    """One sequence's answers are garbage, the other's are right, in the same messages."""

    def reply(a: Asked) -> list[draft_pb2.LinkResponse]:
        at = len(a.tokens) - len(PROMPT)
        if a.tokens[: len(PROMPT)] == tuple(PROMPT):
            return [
                proposals(a.proposal(4_000_000_000, sequence_id=777), a.proposal(*plain_ids[at : at + a.k]))
            ]
        return [refusal(a, draft_pb2.REFUSAL_REASON_MALFORMED)]

    async with linked(model, ScriptedDraft(reply)) as stub:
        good, bad = await asyncio.gather(
            decode(stub, request(SPECULATIVE)), decode(stub, request(SPECULATIVE, prompt=[90, 91]))
        )
    assert good[0] == plain_ids
    assert good[2].speculative.draft_acceptance_rate == 1.0
    assert len(bad[0]) == 30
    assert bad[2].speculative.num_unavailable_rounds >= bad[2].speculative.num_rounds - 1


async def test_out_of_sync_opens_anew(model: Path, plain_ids: list[int]) -> None:
    """A mirror that lost touch once is opened under a higher epoch and used."""
    lost: list[int] = []

    def reply(a: Asked) -> list[draft_pb2.LinkResponse]:
        if not lost:
            lost.append(1)
            return [refusal(a, draft_pb2.REFUSAL_REASON_OUT_OF_SYNC)]
        at = len(a.tokens) - len(PROMPT)
        return [proposals(a.proposal(*plain_ids[at : at + a.k]))]

    servicer = ScriptedDraft(reply)
    async with linked(model, servicer) as stub:
        ids, _, finished = await decode(stub, request(SPECULATIVE))
    assert ids == plain_ids
    assert servicer.opens == 2
    assert finished.speculative.num_unavailable_rounds == 1


async def test_a_drafter_that_hangs_costs_a_bounded_time(model: Path, plain_ids: list[int]) -> None:
    """One wait of draft_wait_s, then the rounds go on plainly."""
    servicer = ScriptedDraft(lambda a: [], delay_s=3600)
    async with linked(model, servicer, "verify.draft_wait_s=0.1") as stub:
        began = time.monotonic()
        ids, rounds, _ = await decode(stub, request(SPECULATIVE))
        assert ids == plain_ids
        assert sum(r.outcome == common_pb2.PROPOSAL_OUTCOME_LATE for r in rounds) == 1
        waited = sum(r.wait_s for r in rounds)
        assert waited >= 0.1
        assert time.monotonic() - began < 20


async def test_the_drafter_goes_in_mid_stream_and_comes_back(model: Path) -> None:
    """I7: no error, the same tokens; when it is back on its port it is used in the same request."""
    async with verify(model) as stub:
        expected = (await decode(stub, request(Plan.plain("test"), max_tokens=400)))[0]

    def oracle(a: Asked) -> list[draft_pb2.LinkResponse]:
        at = len(a.tokens) - len(PROMPT)
        return [proposals(a.proposal(*expected[at : at + 1]))]

    first = ScriptedDraft(oracle, delay_s=0.01)
    second = ScriptedDraft(oracle, delay_s=0.01)
    server = scripted_draft(first)
    endpoint = await server.__aenter__()
    async with verify(model, f"verify.draft_endpoints=['{endpoint}']") as stub:
        await until_available(stub)
        running = asyncio.create_task(decode(stub, request(SPECULATIVE, max_tokens=400)))
        while first.questions < 20:
            await asyncio.sleep(0.01)
        await server.__aexit__(None, None, None)
        async with scripted_draft(second, port=int(endpoint.rsplit(":", 1)[1])):
            ids, rounds, finished = await running
            await until_available(stub)
            again = await decode(stub, request(SPECULATIVE))
    assert ids == expected
    assert finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert [r.index for r in rounds] == list(range(len(rounds)))
    assert again[2].speculative.num_accepted_draft_tokens > 0
    assert second.questions > 0


async def test_bytes_that_are_no_message_do_not_end_the_link_for_ever(
    model: Path, plain_ids: list[int]
) -> None:
    """An unreadable answer costs the connection; the next one is used."""
    good = ScriptedDraft(lambda a: [proposals(wrong(a))])
    calls = []

    async def link(requests: Any, context: Any) -> AsyncIterator[bytes]:
        calls.append(1)
        if len(calls) == 1:
            async for _ in requests:
                yield b"\xff\xff\xff\xff"
            return
        async for response in good.Link(requests, context):
            yield response.SerializeToString()

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handler = grpc.stream_stream_rpc_method_handler(
        link, request_deserializer=draft_pb2.LinkRequest.FromString
    )
    handlers = grpc.method_handlers_generic_handler("paceline.v1.DraftService", {"Link": handler})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with verify(model, f"verify.draft_endpoints=['127.0.0.1:{port}']") as stub:
            await until_available(stub)
            assert (await decode(stub, request(SPECULATIVE)))[0] == plain_ids
    finally:
        await server.stop(0)


@pytest.mark.parametrize("residence_s", [math.nan, -5.0, math.inf, -math.inf, 1e9, 1e308])
async def test_times_of_a_draft_replica_are_not_believed_blindly(
    model: Path, residence_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it says, the parts of a round are finite, not negative, and make up the round; nobody reckons with it."""

    def reply(a: Asked) -> list[draft_pb2.LinkResponse]:
        answer = wrong(a)
        answer.residence_s = answer.draft_s = residence_s
        return [proposals(answer)]

    async with linked(model, ScriptedDraft(reply)) as stub:
        _, rounds, finished = await decode(stub, request(SPECULATIVE))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert all(0 <= record.hidden_draft_s < 60 for record in rounds)
    timings = finished.timings
    parts = [timings.draft_s, timings.network_s, timings.wait_s, timings.verify_s]
    assert all(math.isfinite(part) and part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(timings.decode_s, rel=0.05)


async def test_a_full_draft_replica_does_not_keep_a_sequence_from_one_with_room(model: Path) -> None:
    """Refused for capacity by one, asked of the other in the next round."""
    full = ScriptedDraft(lambda a: [refusal(a, draft_pb2.REFUSAL_REASON_CAPACITY)])
    free = ScriptedDraft(lambda a: [proposals(wrong(a))])
    async with (
        scripted_draft(full) as one,
        scripted_draft(free) as other,
        verify(model, f"verify.draft_endpoints=['{one}', '{other}']") as stub,
    ):
        await until_available(stub)
        await asyncio.sleep(0.5)
        for _ in range(2):
            _, _, finished = await decode(stub, request(SPECULATIVE))
            assert finished.speculative.num_spec_steps > 20


async def test_a_lost_link_leaves_no_task_behind(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of the old stream is collected with a complaint."""
    servicer = ScriptedDraft(lambda a: [proposals(wrong(a))])
    server = scripted_draft(servicer)
    endpoint = await server.__aenter__()
    async with verify(model, f"verify.draft_endpoints=['{endpoint}']") as stub:
        await until_available(stub)
        await decode(stub, request(SPECULATIVE))
        with caplog.at_level("ERROR", logger="asyncio"):
            await server.__aexit__(None, None, None)
            await until_available(stub, available=False)
            await asyncio.sleep(0.2)
            gc.collect()
            await asyncio.sleep(0.1)
        assert [record for record in caplog.records if record.name == "asyncio"] == []


async def test_another_tokenizer_is_refused_and_the_request_goes_on(
    model: Path, plain_ids: list[int]
) -> None:
    """FAILED_PRECONDITION on the link costs speculation, nothing else."""

    class Refusing(ScriptedDraft):
        async def Link(self, requests, context):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another tokenizer")
            yield  # makes it a generator

    async with (
        scripted_draft(Refusing(lambda a: [])) as endpoint,
        verify(model, f"verify.draft_endpoints=['{endpoint}']") as stub,
    ):
        ids, _, finished = await decode(stub, request(SPECULATIVE))
    assert ids == plain_ids
    assert (
        finished.speculative.num_unavailable_rounds == finished.speculative.num_rounds - 1
    )  # the last wants none


@pytest.mark.parametrize("done", [1, 7, 29])
async def test_resuming_from_a_journal_gives_the_same_rest(
    model: Path, plain_ids: list[int], done: int
) -> None:
    """committed_ids take the place of having decoded them here (I2)."""
    async with verify(model) as stub:
        ids, _, _ = await decode(stub, request(Plan.plain("test"), committed_ids=plain_ids[:done]))
    assert plain_ids[:done] + ids == plain_ids


async def test_cancelled_streams_leave_nothing(model: Path) -> None:
    """50 streams cut at random moments: running 0 and all slots free within 2 s, the next request is normal."""
    dice = random.Random(2)
    servicer = ScriptedDraft(lambda a: [proposals(wrong(a))])
    async with linked(model, servicer, "verify.kv_slots=16") as stub:

        async def cut() -> None:
            call = stub.Decode(request(SPECULATIVE, max_tokens=800))
            await asyncio.sleep(dice.random())
            call.cancel()

        await asyncio.gather(*(cut() for _ in range(50)))
        async with asyncio.timeout(2):
            while True:
                info = await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())
                if info.num_running == info.num_waiting == 0 and info.kv_slots_free == info.kv_slots == 16:
                    break
                await asyncio.sleep(0.02)
        async with asyncio.timeout(2):
            while servicer.live:
                await asyncio.sleep(0.02)
        assert len((await decode(stub, request(SPECULATIVE)))[0]) == 30


async def test_a_draft_replica_named_twice_is_one(model: Path) -> None:
    """One link: two under the same name would take each other's place for ever."""
    servicer = ScriptedDraft(lambda a: [proposals(wrong(a))])
    async with scripted_draft(servicer) as endpoint:
        twice = f"verify.draft_endpoints=['{endpoint}', '{endpoint}']"
        async with verify(model, twice) as stub:
            await until_available(stub)
            await asyncio.sleep(0.5)
            assert len((await decode(stub, request(SPECULATIVE)))[0]) == 30
            assert servicer.links == 1


async def test_a_wait_without_an_end_harms_nobody(model: Path, plain_ids: list[int]) -> None:
    """Longer than the system's clocks can wait: as long as it takes."""
    servicer = ScriptedDraft(lambda a: [proposals(wrong(a))], delay_s=0.02)
    endless = ("verify.draft_wait_s=1e20", "verify.draft_wait_least_s=1e20")
    async with linked(model, servicer, *endless) as stub:
        assert (await decode(stub, request(SPECULATIVE)))[0] == plain_ids


async def test_an_engine_that_hangs_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health over the wire: NOT_SERVING while a step hangs and work waits, SERVING again after; no token is lost."""
    load, goes_on = verify_service.service._load, threading.Event()

    def loaded(config: Any) -> Any:
        runner = load(config)
        forward = runner.forward

        def hanging(segments: Any) -> torch.Tensor:
            goes_on.wait(30)
            return forward(segments)

        monkeypatch.setattr(runner, "forward", hanging)
        return runner

    goes_on.set()
    monkeypatch.setattr(verify_service.service, "_load", loaded)
    health = health_pb2.HealthCheckResponse
    async with verify(model, "verify.stall_s=0.5") as stub:
        before = await decode(stub, request(Plan.plain("test")))
        goes_on.clear()
        decoding = asyncio.create_task(decode(stub, request(Plan.plain("test"))))
        watch = health_pb2_grpc.HealthStub(stub.channel).Watch(health_pb2.HealthCheckRequest())
        seen = []
        async with asyncio.timeout(20):
            async for reply in watch:
                seen.append(reply.status)
                if reply.status == health.NOT_SERVING:
                    assert not decoding.done()
                    goes_on.set()
                if seen[-2:] == [health.NOT_SERVING, health.SERVING]:
                    break
        assert (await decoding)[0] == before[0]


async def test_a_full_queue_is_refused_with_a_time_to_come_back(model: Path) -> None:
    """RESOURCE_EXHAUSTED with RetryInfo; those in flight are not hurt."""
    async with verify(model, "verify.kv_slots=1", "verify.max_queue=2") as stub:
        calls = [stub.Decode(request(Plan.plain("test"), max_tokens=300)) for _ in range(3)]
        async with asyncio.timeout(5):
            while (await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())).num_waiting < 2:
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decode(stub, request(Plan.plain("test")))
        error = error_from_rpc(caught.value)
        assert isinstance(error, CapacityError)
        assert error.retry_after_s > 0
        for call in calls:
            async for response in call:
                last = response
            assert last.HasField("finished")


async def test_a_deadline_frees_the_sequence(model: Path) -> None:
    """The caller's time is over: the slot is free soon after."""
    async with verify(model, "verify.kv_slots=1") as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Decode(request(Plan.plain("test"), max_tokens=900), timeout=0.2):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert len((await decode(stub, request(Plan.plain("test"))))[0]) == 30


async def test_a_deadline_that_passes_in_the_queue_is_the_answer(model: Path) -> None:
    """Never admitted, DEADLINE_EXCEEDED, and nothing of it is left in the line."""
    async with verify(model, "verify.kv_slots=1") as stub:
        running = stub.Decode(request(Plan.plain("test"), max_tokens=900))
        await running.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Decode(request(Plan.plain("test")), timeout=0.1).read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(2):
            while (await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())).num_waiting:
                await asyncio.sleep(0.01)
        running.cancel()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (request(Plan.plain("test"), prompt=[]), "prompt_ids"),
        (request(Plan.plain("test"), prompt=[600]), "prompt_ids"),
        (request(Plan.plain("test"), prompt=[70] * 5000), "prompt_ids"),
        (request(Plan.plain("test"), max_tokens=0), "max_tokens"),
        (request(Plan.plain("test"), max_tokens=2, committed_ids=[70, 71]), "max_tokens"),
        (request(Plan.speculative("scripted", 65, "test")), "plan.k_max"),
        (request(Plan.speculative("scripted", 0, "test")), "plan.k_max"),
        *(
            (request(SPECULATIVE, sampling=common_pb2.SamplingParams(**{field: value})), f"sampling.{field}")
            for field, value in (
                ("temperature", math.nan),
                ("temperature", -1.0),
                ("top_p", 0.0),
                ("min_p", 2.0),
                ("repetition_penalty", 0.0),
                ("presence_penalty", math.inf),
            )
        ),
    ],
)
async def test_what_cannot_be_decoded_is_refused(
    model: Path, message: verify_pb2.DecodeRequest, field: str
) -> None:
    """A typed error that names the field."""
    async with verify(model) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decode(stub, message)
        error = error_from_rpc(caught.value)
        assert isinstance(error, InvalidRequestError)
        assert error.violations[0].field == field
        assert len((await decode(stub, request(Plan.plain("test"))))[0]) == 30

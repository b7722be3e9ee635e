"""Many sequences over one stream (DecodeMany): each as if it were alone, and none hurt by another."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from scripted_verify import Break, Script, ask, pair, running_router, scripted_verify, tokenizer
from test_verify_service import Stub, decode, request, verify

from paceline.errors import CapacityError, DeadlineError, InvalidRequestError, PeerLostError
from paceline.serving.channel import open_channel
from paceline.serving.status import error_from_status
from paceline.telemetry import names
from paceline.testing.tiny_models import tiny_model_dir
from paceline.types import Plan
from paceline.v1 import verify_pb2, verify_pb2_grpc
from router.decode_calls import DecodeCall, DecodeCalls
from verify_service.service import VerifyService
from verify_service.spans import DecodeSpans

PLAIN = Plan.plain("test")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def calls_to(stub: Stub) -> AsyncIterator[DecodeCalls]:
    calls = DecodeCalls("there", stub)
    try:
        yield calls
    finally:
        await calls.close()


async def read_all(call: DecodeCall) -> list[int]:
    """The tokens; the call's shape is checked."""
    first = await call.read()
    assert first.HasField("admitted")
    ids: list[int] = []
    while not (response := await call.read()).HasField("finished"):
        ids += response.run.token_ids
    return ids


async def until_idle(stub: Stub) -> None:
    async with asyncio.timeout(5):
        while True:
            info = await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())
            if info.num_running == info.num_waiting == 0 and info.kv_slots_free == info.kv_slots:
                return
            await asyncio.sleep(0.02)


async def test_each_sequence_says_what_it_says_alone(model: Path) -> None:
    """Twelve prompts at once over one stream, on eight slots."""
    prompts = [[70 + i, 80, 90 + i] for i in range(12)]
    async with verify(model, "verify.kv_slots=8") as stub, calls_to(stub) as calls:
        alone = [(await decode(stub, request(PLAIN, prompt=prompt)))[0] for prompt in prompts]
        together = [calls.call(request(PLAIN, prompt=prompt), timeout_s=30) for prompt in prompts]
        assert await asyncio.gather(*map(read_all, together)) == alone
        await until_idle(stub)


async def test_news_of_a_step_are_one_message(model: Path) -> None:
    """Eight sequences that decode side by side need hardly more messages than one."""
    async with verify(model, "verify.kv_slots=8") as stub:
        outbox: asyncio.Queue[verify_pb2.DecodeManyRequest] = asyncio.Queue()

        async def requests() -> AsyncIterator[verify_pb2.DecodeManyRequest]:
            while True:
                yield await outbox.get()

        stream = stub.DecodeMany(requests())
        for number in range(8):
            start = verify_pb2.DecodeStart(number=number, request=request(PLAIN, prompt=[70 + number] * 3))
            outbox.put_nowait(verify_pb2.DecodeManyRequest(start=start))
        messages = events = over = 0
        while over < 8:
            response = await stream.read()
            messages += 1
            events += len(response.events)
            over += sum(event.response.HasField("finished") for event in response.events)
        stream.cancel()
    assert events == 8 * (30 + 2)
    assert messages < events / 3


async def test_a_sequence_that_is_refused_hurts_no_other(model: Path) -> None:
    """Nothing to decode, a time that is none, a full queue: typed errors, the others go on."""
    async with verify(model, "verify.kv_slots=1", "verify.max_queue=1") as stub, calls_to(stub) as calls:
        running = calls.call(request(PLAIN, max_tokens=300), timeout_s=None)
        assert (await running.read()).HasField("admitted")
        with pytest.raises(InvalidRequestError, match="prompt_ids"):
            await calls.call(request(PLAIN, prompt=[]), timeout_s=None).read()
        with pytest.raises(InvalidRequestError, match="timeout_s"):
            await calls.call(request(PLAIN), timeout_s=math.inf).read()
        with pytest.raises(PeerLostError, match="there: this replica serves another model"):
            await calls.call(request(PLAIN, identity=["another"]), timeout_s=None).read()
        waiting = calls.call(request(PLAIN), timeout_s=None)
        await asyncio.sleep(0.05)
        with pytest.raises(CapacityError) as full:
            await calls.call(request(PLAIN), timeout_s=None).read()
        assert full.value.retry_after_s > 0
        waiting.cancel()
        running.cancel()
        await until_idle(stub)


async def test_a_deadline_ends_its_own_sequence(model: Path) -> None:
    """In the queue and while decoding."""
    async with verify(model, "verify.kv_slots=1") as stub, calls_to(stub) as calls:
        running = calls.call(request(PLAIN, max_tokens=900), timeout_s=0.3)
        await running.read()
        with pytest.raises(DeadlineError):
            await calls.call(request(PLAIN), timeout_s=0.1).read()
        with pytest.raises(DeadlineError):
            while True:
                await running.read()
        running.cancel()
        await until_idle(stub)
        assert len(await read_all(calls.call(request(PLAIN), timeout_s=30))) == 30


async def test_cancelled_ones_and_an_ended_stream_leave_nothing(model: Path) -> None:
    """Half are cancelled one by one, the others with their stream; a later call opens another stream."""
    async with verify(model, "verify.kv_slots=4") as stub:
        async with calls_to(stub) as calls:
            begun = [calls.call(request(PLAIN, max_tokens=800), timeout_s=None) for _ in range(12)]
            await begun[0].read()
            for call in begun[::2]:
                call.cancel()
                call.cancel()  # twice is once
            await begun[1].read()
        with pytest.raises(PeerLostError):
            while True:
                await begun[1].read()
        await until_idle(stub)
        assert len(await read_all(calls.call(request(PLAIN), timeout_s=30))) == 30
        await calls.close()


async def test_a_stream_that_never_was_ends_its_calls(model: Path) -> None:
    """Closed before it was opened, or on a channel that is closed: no call waits for ever, neither these nor later ones."""
    async with verify(model) as stub:
        calls = DecodeCalls("there", stub)
        early = calls.call(request(PLAIN), timeout_s=None)
        await calls.close()
        async with asyncio.timeout(5):
            with pytest.raises(PeerLostError, match="closed"):
                await early.read()
        assert len(await read_all(calls.call(request(PLAIN), timeout_s=30))) == 30
        await calls.close()
        channel = open_channel(stub.server.address)
        await channel.close()
        calls = DecodeCalls("there", verify_pb2_grpc.VerifyServiceStub(channel))
        for _ in range(2):
            async with asyncio.timeout(5):
                with pytest.raises(PeerLostError):
                    await calls.call(request(PLAIN), timeout_s=None).read()
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([verify_pb2.DecodeManyRequest()], "message"),
        ([verify_pb2.DecodeManyRequest(start=verify_pb2.DecodeStart(number=3))] * 2, "start.number"),
    ],
)
async def test_what_is_no_message_ends_the_stream(
    model: Path,
    messages: list[verify_pb2.DecodeManyRequest],
    field: str,
) -> None:
    """Nobody could say which sequence it concerns."""

    async def requests() -> AsyncIterator[verify_pb2.DecodeManyRequest]:
        for message in messages:
            yield message

    async with verify(model) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
            async for _ in stub.DecodeMany(requests()):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len((await decode(stub, request(PLAIN)))[0]) == 30


async def test_a_caller_that_says_no_more_gets_what_it_asked_for(model: Path) -> None:
    """Closing its side, or cancelling what was over long ago, ends nothing that runs."""

    async def requests() -> AsyncIterator[verify_pb2.DecodeManyRequest]:
        start = verify_pb2.DecodeStart(number=0, request=request(PLAIN))
        yield verify_pb2.DecodeManyRequest(start=start)
        yield verify_pb2.DecodeManyRequest(cancel=77)

    async with verify(model) as stub:
        events = [event async for response in stub.DecodeMany(requests()) for event in response.events]
    assert len(events) == 32
    assert events[-1].response.HasField("finished")


async def test_a_replica_that_drains_ends_what_it_has_and_takes_no_more(model: Path) -> None:
    """The stream that is open already takes no further sequence, and ends with its last one."""
    async with verify(model) as stub, calls_to(stub) as calls:
        running = calls.call(request(PLAIN, max_tokens=300), timeout_s=None)
        await running.read()
        stopping = asyncio.create_task(stub.server.stop(30))
        while not stub.server.draining:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        with pytest.raises(PeerLostError, match="stopping"):
            await calls.call(request(PLAIN), timeout_s=None).read()
        num_tokens = 0
        while not (response := await running.read()).HasField("finished"):
            num_tokens += len(response.run.token_ids)
        assert num_tokens == 300
        async with asyncio.timeout(5):
            await stopping


async def test_a_fault_in_the_account_of_one_sequence_hurts_no_other(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled, finished, or ended with its stream: what its spans raise stays its own."""
    end = DecodeSpans.end

    def faulty(self: DecodeSpans, now: float) -> None:
        end(self, now)
        if self._attributes[names.REQUEST_ID] == "faulty":
            raise ValueError("a fault of ours")

    monkeypatch.setattr(DecodeSpans, "end", faulty)
    bad, long = request(PLAIN, max_tokens=20), request(PLAIN, max_tokens=800)
    bad.request_id = long.request_id = "faulty"
    async with verify(model) as stub:
        async with calls_to(stub) as calls:
            good = calls.call(request(PLAIN, max_tokens=200), timeout_s=None)
            cancelled = calls.call(long, timeout_s=None)
            await cancelled.read()
            cancelled.cancel()
            assert len(await read_all(calls.call(bad, timeout_s=None))) == 20
            assert len(await read_all(good)) == 200
            for _ in range(3):
                await calls.call(long, timeout_s=None).read()
        await until_idle(stub)


async def test_a_stream_that_begins_while_the_replica_drains_holds_up_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call was let in before, its handler runs after: it ends at once, and the replica with it."""
    begin, decode_many = asyncio.Event(), VerifyService.DecodeMany

    async def late(self: VerifyService, request_iterator: object, context: object) -> None:
        await begin.wait()
        await decode_many(self, request_iterator, context)

    monkeypatch.setattr(VerifyService, "DecodeMany", late)
    async with verify(model) as stub, calls_to(stub) as calls:
        call = calls.call(request(PLAIN), timeout_s=None)
        while not stub.server.num_in_flight:
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(stub.server.stop(30))
        await asyncio.sleep(0.1)
        begin.set()
        async with asyncio.timeout(5):
            with pytest.raises(PeerLostError):
                await read_all(call)
            await stopping


async def test_one_request_that_breaks_the_stream_delays_the_others_only() -> None:
    """The transport breaks under three requests: each goes on where it was."""
    ids = tokenizer().encode("one two three four five six seven eight")
    script = Script(output=ids, delay_s=0.02, breaks=[Break(4, transport=True)])
    async with pair(script) as (client, _):
        answers = await asyncio.gather(*[ask(client, max_tokens=len(ids)) for _ in range(3)])
    assert [answer.ids for answer in answers] == [ids] * 3
    assert sum(answer.finished.resumed for answer in answers) == 3


async def test_an_older_replica_is_no_place_to_go() -> None:
    """It knows only Decode: said so, and the request goes to another one."""
    ids = tokenizer().encode("one two three")
    async with (
        scripted_verify(Script(output=ids)) as old,
        scripted_verify(Script(output=ids, num_running=2)) as new,
        running_router([old.address, new.address]) as client,
    ):
        old.servicer.is_old = True
        answer = await ask(client, max_tokens=len(ids))
        assert answer.ids == ids
        async with running_router([old.address]) as other:
            with pytest.raises(PeerLostError, match="older than this router"):
                await ask(other, max_tokens=len(ids))


def test_a_status_that_is_none_is_an_error_of_the_peer() -> None:
    """Neither bytes that are no message nor a code that does not exist raise anything else."""
    assert "status" in str(error_from_status(b"\xff\xff"))
    assert "status" in str(error_from_status(b"\x08\x63"))

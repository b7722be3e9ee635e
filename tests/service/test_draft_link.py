"""The draft tier over a real socket: what a verify replica may rely on, and what its mistakes cost."""

import asyncio
import contextlib

import grpc
import pytest

from draft_service.drafters.lookup import LookupDrafter
from draft_service.service import DraftService, serve
from paceline.codec import sampling_to_pb
from paceline.config import DraftConfig, ServerConfig
from paceline.link import Fate
from paceline.lookup.ngram import NgramLookup
from paceline.serving.channel import open_channel
from paceline.telemetry import Telemetry
from paceline.testing.scripted_drafter import ScriptedDrafter
from paceline.types import SamplingParams
from paceline.v1 import draft_pb2 as pb
from paceline.v1.draft_pb2_grpc import DraftServiceStub

FINGERPRINT = "f" * 64
VOCAB = 100


def count_up(request):
    return [request.token_ids[-1] + 1 + i for i in range(request.k)]


def opening(
    sequence_id, token_ids=(1, 2, 3), *, epoch=1, drafter="scripted", prompt_len=1, k=2, round_index=0
):
    return pb.SequenceOpen(
        sequence_id=sequence_id,
        epoch=epoch,
        drafter=drafter,
        token_ids=token_ids,
        prompt_len=prompt_len,
        sampling=sampling_to_pb(SamplingParams()),
        k=k,
        round=round_index,
    )


def commit(sequence_id, base_len, token_ids, *, epoch=1, k=2, round_index=1):
    return pb.SequenceCommit(
        sequence_id=sequence_id,
        epoch=epoch,
        base_len=base_len,
        token_ids=token_ids,
        k=k,
        round=round_index,
    )


def close(sequence_id, epoch=1):
    return pb.SequenceClose(sequence_id=sequence_id, epoch=epoch)


class Peer:
    """A verify replica's end of a link."""

    def __init__(self, address):
        self._channel = open_channel(address)
        self.call = DraftServiceStub(self._channel).Link()

    async def hello(self, *, fingerprint=FINGERPRINT, vocab_size=VOCAB):
        hello = pb.LinkHello(verify_id="v", tokenizer_fingerprint=fingerprint, vocab_size=vocab_size)
        await self.call.write(pb.LinkRequest(hello=hello))
        return (await self.read()).welcome

    async def read(self):
        async with asyncio.timeout(10):
            return await self.call.read()

    async def send(self, *entries):
        kinds = {pb.SequenceOpen: "opens", pb.SequenceCommit: "commits", pb.SequenceClose: "closes"}
        update = pb.LinkUpdate()
        for entry in entries:
            getattr(update, kinds[type(entry)]).append(entry)
        await self.call.write(pb.LinkRequest(update=update))

    async def answers(self, count):
        """So many proposals and refusals, in the order of their coming."""
        got = []
        while len(got) < count:
            message = (await self.read()).proposals
            got += [*message.refusals, *message.proposals]
        assert len(got) == count, got
        return got

    async def cut(self):
        self.call.cancel()
        await self._channel.close()


@pytest.fixture
async def start():
    """Starts a draft tier around drafters; gives (service, new peer). Everything ends after the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def run(*drafters, stall_s=30.0):
            service = DraftService(
                {drafter.name: drafter for drafter in drafters},
                draft_id="d",
                tokenizer_fingerprint=FINGERPRINT,
                telemetry=Telemetry(),
            )
            server = serve(service, DraftConfig(server=ServerConfig(port=0), stall_s=stall_s))
            await server.start()
            stack.push_async_callback(server.stop, 1.0)

            def peer():
                new = Peer(server.address)
                stack.push_async_callback(new.cut)
                return new

            service.address = server.address
            return service, peer

        yield run


async def until(condition, within_s=10):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_welcome_names_the_drafters(start):
    """Name, version and limit of each."""
    _, peer = await start(
        ScriptedDrafter(count_up, max_context=77),
        LookupDrafter(NgramLookup("ngram", min_match=2, max_match=8)),
    )
    welcome = await peer().hello()
    assert welcome.draft_id == "d"
    assert [(o.name, o.version, o.max_context) for o in welcome.drafters] == [
        ("scripted", "scripted-1", 77),
        ("ngram", "ngram-1-2-8", 0),
    ]


async def test_open_commit_close(start):
    """Each question gets one answer with its stamp and times; after the close the drafter holds nothing."""
    drafter = ScriptedDrafter(count_up)
    service, peer = await start(drafter)
    verify = peer()
    await verify.hello()
    await verify.send(opening(7, [1, 2, 3]))
    (first,) = await verify.answers(1)
    assert (first.sequence_id, first.epoch, first.base_len, list(first.token_ids)) == (7, 1, 3, [4, 5])
    assert 0 <= first.queue_s <= first.residence_s
    assert 0 <= first.draft_s <= first.residence_s < 10
    await verify.send(commit(7, 3, [4, 9], k=3))
    (second,) = await verify.answers(1)
    assert (second.base_len, list(second.token_ids)) == (5, [10, 11, 12])
    await verify.send(close(7))
    await until(lambda: not drafter.opened)
    assert service.num_mirrors == 0
    assert not service.fates


async def test_mirror_only_is_not_answered(start):
    """k = 0 asks nothing, and the mirror follows all the same."""
    drafter = ScriptedDrafter(count_up)
    _, peer = await start(drafter)
    verify = peer()
    await verify.hello()
    await verify.send(opening(1, [1], k=0))
    await verify.send(commit(1, 1, [2], k=0))
    await verify.send(commit(1, 2, [3], k=1))
    (answer,) = await verify.answers(1)
    assert (answer.base_len, list(answer.token_ids)) == (3, [4])
    assert len(drafter.batches) == 1


async def test_no_guess_is_an_answer(start):
    """An empty proposal tells the verify tier not to wait."""
    _, peer = await start(LookupDrafter(NgramLookup("ngram", min_match=2, max_match=8)))
    verify = peer()
    await verify.hello()
    await verify.send(opening(1, [1, 2, 3], drafter="ngram"), opening(2, [5, 6, 9, 5, 6], drafter="ngram"))
    answers = {a.sequence_id: list(a.token_ids) for a in await verify.answers(2)}
    assert answers == {1: [], 2: [9, 5]}


async def test_one_message_for_a_step(start):
    """The questions of one update are one batch, and its answers one message."""
    drafter = ScriptedDrafter(count_up)
    _, peer = await start(drafter)
    verify = peer()
    await verify.hello()
    await verify.send(*(opening(i) for i in range(32)))
    message = (await verify.read()).proposals
    assert [p.sequence_id for p in message.proposals] == list(range(32))
    assert [len(batch) for batch in drafter.batches] == [32]


async def test_gap_then_reopened(start):
    """A commit that builds on something that never came is refused; a higher epoch heals it."""
    service, peer = await start(ScriptedDrafter(count_up))
    verify = peer()
    await verify.hello()
    await verify.send(opening(1))
    await verify.answers(1)
    await verify.send(commit(1, 5, [9]))
    (refusal,) = await verify.answers(1)
    assert (refusal.sequence_id, refusal.epoch) == (1, 1)
    assert refusal.reason == pb.REFUSAL_REASON_OUT_OF_SYNC
    await verify.send(opening(1, [1, 2, 3, 4, 5, 9], epoch=2))
    (answer,) = await verify.answers(1)
    assert (answer.epoch, answer.base_len, list(answer.token_ids)) == (2, 6, [10, 11])
    assert service.fates == {Fate.GAP: 1}


async def test_stale_and_duplicate_are_counted_and_not_answered(start):
    """Neither changes the mirror; the next honest commit applies."""
    service, peer = await start(ScriptedDrafter(count_up))
    verify = peer()
    await verify.hello()
    await verify.send(opening(1, epoch=2))
    answers = await verify.answers(1)
    await verify.send(opening(1, epoch=2), opening(1, epoch=1), commit(1, 2, [3], epoch=2), commit(1, 3, [8]))
    await verify.send(commit(1, 3, [4], epoch=2))
    answers += await verify.answers(1)
    assert [(a.epoch, a.base_len) for a in answers] == [(2, 3), (2, 4)]
    assert service.fates == {Fate.STALE: 2, Fate.DUPLICATE: 2}


async def test_malformed_entries_harm_only_their_sequence(start):
    """Bad entries of every kind beside good ones in one message: each is refused in words, the good ones go on."""
    _, peer = await start(ScriptedDrafter(count_up))
    verify = peer()
    await verify.hello()
    await verify.send(opening(1), opening(2))
    await verify.answers(2)
    await verify.send(
        opening(10, []),
        opening(11, [1, VOCAB]),
        opening(12, drafter="oracle"),
        opening(13, k=1000),
        opening(14, prompt_len=9),
        opening(15, epoch=0),
        opening(16, [50]),
        commit(2, 3, [VOCAB]),
        commit(1, 3, [4]),
        commit(99, 3, [4]),
        close(77),
    )
    answers = {a.sequence_id: a for a in await verify.answers(10)}
    reasons = {i: a.reason for i, a in answers.items() if isinstance(a, pb.SequenceRefusal)}
    malformed = pb.REFUSAL_REASON_MALFORMED
    assert reasons == {
        10: malformed,
        11: malformed,
        12: pb.REFUSAL_REASON_UNKNOWN_DRAFTER,
        13: malformed,
        14: malformed,
        15: malformed,
        2: malformed,
        99: pb.REFUSAL_REASON_OUT_OF_SYNC,
    }
    assert "scripted" in answers[12].message, "says what there is"
    assert list(answers[1].token_ids) == [5, 6]
    assert list(answers[16].token_ids) == [51, 52]


async def test_bytes_that_are_no_message_are_skipped(start, caplog):
    """The link lives on; what the message spoke of would show as a gap."""
    service, _ = await start(ScriptedDrafter(count_up))
    channel = open_channel(service.address)
    raw = channel.stream_stream("/paceline.v1.DraftService/Link")()
    hello = pb.LinkHello(verify_id="v", tokenizer_fingerprint=FINGERPRINT, vocab_size=VOCAB)
    await raw.write(pb.LinkRequest(hello=hello).SerializeToString())
    await raw.read()
    await raw.write(b"\xff\xff\xff\xff")
    await raw.write(pb.LinkRequest(update=pb.LinkUpdate(opens=[opening(1)])).SerializeToString())
    answer = pb.LinkResponse.FromString(await raw.read())
    assert list(answer.proposals.proposals[0].token_ids) == [4, 5]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    raw.cancel()
    await channel.close()


@pytest.mark.parametrize(
    ("hello", "code", "words"),
    [
        (
            pb.LinkHello(verify_id="v7", tokenizer_fingerprint="abc", vocab_size=9),
            "FAILED_PRECONDITION",
            "'v7'",
        ),
        (pb.LinkHello(vocab_size=9), "FAILED_PRECONDITION", "tokenizers differ"),
        (pb.LinkHello(tokenizer_fingerprint=FINGERPRINT), "INVALID_ARGUMENT", "vocab_size"),
        (None, "FAILED_PRECONDITION", "must be a hello"),
    ],
)
async def test_a_link_that_cannot_work_is_refused_in_words(start, hello, code, words):
    """Another tokenizer, no vocabulary, no hello: the stream ends with a status that says why."""
    _, peer = await start(ScriptedDrafter(count_up))
    verify = peer()
    await verify.call.write(pb.LinkRequest(hello=hello) if hello else pb.LinkRequest(update=pb.LinkUpdate()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await verify.read()
    assert caught.value.code().name == code
    assert words in caught.value.details()


async def test_a_second_hello_ends_the_link(start):
    """It cannot be meant; the mirrors are freed."""
    drafter = ScriptedDrafter(count_up)
    _, peer = await start(drafter)
    verify = peer()
    await verify.hello()
    await verify.send(opening(1))
    await verify.answers(1)
    await verify.call.write(pb.LinkRequest(hello=pb.LinkHello()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await verify.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: not drafter.opened)


@pytest.mark.parametrize("way", ["cancel", "half-close", "channel", "hanging"])
async def test_fifty_sequences_and_the_stream_cut(start, way, caplog):
    """However a verify replica goes, its places are free within 2 s, and the next one gets them."""
    drafter = ScriptedDrafter(count_up, capacity=50)
    service, peer = await start(drafter)
    verify = peer()
    await verify.hello()
    await verify.send(*(opening(i) for i in range(50)))
    await verify.answers(50)
    assert len(drafter.opened) == service.num_mirrors == 50
    if way == "hanging":
        drafter.hang()
    await verify.send(*(commit(i, 3, [4]) for i in range(50)))  # cut in mid-round
    if way == "half-close":
        await verify.call.done_writing()
    elif way == "channel":
        await verify._channel.close()
    else:
        verify.call.cancel()
    await until(lambda: service.num_mirrors == 0, within_s=2)
    drafter.let_go()
    await until(lambda: not drafter.opened, within_s=2)
    assert service.num_sequences == 0
    again = peer()
    await again.hello()
    await again.send(*(opening(i) for i in range(51)))
    answers = await again.answers(51)
    assert [a.reason for a in answers if isinstance(a, pb.SequenceRefusal)] == [pb.REFUSAL_REASON_CAPACITY]
    assert not [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]


async def test_two_links_do_not_see_each_other(start):
    """Sequence ids are each verify replica's own; the end of one link leaves the other alone."""
    drafter = ScriptedDrafter(count_up)
    service, peer = await start(drafter)
    one, two = peer(), peer()
    await one.hello()
    await two.hello()
    await one.send(opening(1, [10]))
    await two.send(opening(1, [20]))
    assert list((await one.answers(1))[0].token_ids) == [11, 12]
    assert list((await two.answers(1))[0].token_ids) == [21, 22]
    await one.cut()
    await until(lambda: service.num_mirrors == 1)
    await two.send(commit(1, 1, [30]))
    assert list((await two.answers(1))[0].token_ids) == [31, 32]


async def test_a_drafter_that_raises(start, caplog):
    """The sequence it fails on is refused with the reason; the others of the batch get their guesses."""

    def script(request):
        if request.token_ids[0] == 13:
            raise RuntimeError("boom")
        return [1]

    _, peer = await start(ScriptedDrafter(script))
    verify = peer()
    await verify.hello()
    await verify.send(*(opening(i, [i]) for i in (12, 13, 14)))
    answers = {a.sequence_id: a for a in await verify.answers(3)}
    assert answers[13].reason == pb.REFUSAL_REASON_INTERNAL
    assert answers[13].message == "RuntimeError: boom"
    assert list(answers[12].token_ids) == list(answers[14].token_ids) == [1]
    await verify.send(commit(13, 1, [1]), commit(12, 1, [1]))
    assert [a.sequence_id for a in await verify.answers(1)] == [12]
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1


async def test_a_drafter_that_hangs(start):
    """The quick drafters go on, health says NOT_SERVING while it lasts and SERVING after; no answer is lost."""
    slow = ScriptedDrafter(count_up, name="slow", slow=True)
    service, peer = await start(
        slow, LookupDrafter(NgramLookup("ngram", min_match=2, max_match=8)), stall_s=0.1
    )
    verify = peer()
    await verify.hello()
    slow.hang()
    await verify.send(opening(1, drafter="slow"))
    await until(slow.hanging.is_set)
    await verify.send(opening(2, [5, 6, 9, 5, 6], drafter="ngram"))
    assert [a.sequence_id for a in await verify.answers(1)] == [2]
    assert await health(service.address, until_status=2) == 2
    await verify.send(commit(1, 3, [7]))
    slow.let_go()
    answers = await verify.answers(2)
    assert [(a.base_len, list(a.token_ids)) for a in answers] == [(3, [4, 5]), (4, [8, 9])]
    assert await health(service.address, until_status=1) == 1


async def health(address, until_status):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with open_channel(address) as channel, asyncio.timeout(5):
        async for reply in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            if reply.status == until_status:
                return reply.status
    return None


async def test_a_peer_that_does_not_read(start, monkeypatch):
    """Its proposals do not pile up without bound: it is not read either, until it reads."""
    monkeypatch.setattr("draft_service.stream.MAX_UNSENT", 8)
    service, peer = await start(ScriptedDrafter(lambda request: [1] * 64))
    verify = peer()
    await verify.hello()
    rounds = 1000

    async def write():
        await verify.send(*(opening(i, [1], k=64) for i in range(16)))
        for n in range(1, rounds):
            await verify.send(*(commit(i, n, [1], k=64, round_index=n) for i in range(16)))

    writing = asyncio.create_task(write())
    await asyncio.wait({writing}, timeout=0.5)
    (stream,) = service._streams
    assert len(stream._unsent) < 8 + 16
    last = {}
    while any(last.get(i) != rounds for i in range(16)):
        for answer in (await verify.read()).proposals.proposals:
            last[answer.sequence_id] = answer.base_len
    await writing


async def test_a_drain_ends_the_links(start):
    """Stopping does not wait for streams that never end: the peer sees an orderly end of its link."""
    service, peer = await start(ScriptedDrafter(count_up))
    verify = peer()
    await verify.hello()
    await verify.send(opening(1))
    await verify.answers(1)
    await service.end_links()
    assert await verify.read() is grpc.aio.EOF
    assert await verify.call.code() is grpc.StatusCode.OK
    assert service.num_mirrors == 0

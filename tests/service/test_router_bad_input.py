"""Bad input over a real socket: one clear INVALID_ARGUMENT with every wrong field, nothing started, no log noise."""

import logging
import threading
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2
from scripted_verify import MAX_CONTEXT, RunningVerify, Script, ask, pair, tokenizer

from paceline.client import Client
from paceline.errors import IncompatiblePeerError, PeerLostError
from paceline.serving.channel import open_channel
from paceline.v1 import common_pb2, router_pb2, router_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

Sampling = common_pb2.SamplingParams
Override = router_pb2.DecodingOverride
PLAIN = common_pb2.DECODING_MODE_PLAIN
SPECULATIVE = common_pb2.DECODING_MODE_SPECULATIVE
NAN, INF = float("nan"), float("inf")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[tuple[Client, RunningVerify]]:
    async with pair(Script(output=[70, 71], drafters=[("ngram", True)])) as running:
        await ask(running[0], max_tokens=1)
        yield running


async def violations(client: Client, request: router_pb2.GenerateRequest | bytes) -> dict[str, str]:
    """The fields refused, with their descriptions; fails unless the request is refused as invalid."""
    async with open_channel(client.address) as channel:
        call = channel.unary_stream(
            "/paceline.v1.RouterService/Generate",
            request_serializer=lambda r: r if isinstance(r, bytes) else r.SerializeToString(),
            response_deserializer=router_pb2.GenerateResponse.FromString,
        )(request, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    packed = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    for detail in status_pb2.Status.FromString(packed).details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            return {v.field: v.description for v in bad.field_violations}
    raise AssertionError("no field violations")


def request(**fields) -> router_pb2.GenerateRequest:
    if not {"text", "chat", "tokens"} & set(fields):
        fields["text"] = "Hello"
    return router_pb2.GenerateRequest(**fields)


def chat(*turns: tuple[str, str]) -> router_pb2.ChatInput:
    return router_pb2.ChatInput(messages=[router_pb2.ChatMessage(role=r, content=c) for r, c in turns])


BAD = {
    "missing input": (router_pb2.GenerateRequest(), {"input": "missing"}),
    "empty text": (request(text=""), {"text": "empty"}),
    "no messages": (request(chat=chat()), {"chat.messages": "empty"}),
    "unknown role": (request(chat=chat(("robot", "Hi"))), {"chat.messages[0].role": "'robot'"}),
    "empty turn": (request(chat=chat(("user", "Hi"), ("user", ""))), {"chat.messages[1].content": "empty"}),
    "no ids": (request(tokens=router_pb2.TokenInput()), {"tokens.ids": "empty"}),
    "id beyond the vocabulary": (request(tokens=router_pb2.TokenInput(ids=[5, 512])), {"tokens.ids[1]": "512"}),
    "ids beyond the context": (request(tokens=router_pb2.TokenInput(ids=[5] * MAX_CONTEXT)), {"tokens.ids": "256"}),
    "text beyond the context": (request(text="12 " * 100), {"text": "at most 255"}),
    "negative temperature": (request(sampling=Sampling(temperature=-0.1)), {"sampling.temperature": "-0.1"}),
    "temperature not a number": (request(sampling=Sampling(temperature=NAN)), {"sampling.temperature": "nan"}),
    "infinite temperature": (request(sampling=Sampling(temperature=INF)), {"sampling.temperature": "inf"}),
    "top_p zero": (request(sampling=Sampling(top_p=0)), {"sampling.top_p": "0.0; expected a number in (0, 1]"}),
    "top_p above one": (request(sampling=Sampling(top_p=1.5)), {"sampling.top_p": "1.5"}),
    "min_p one": (request(sampling=Sampling(min_p=1)), {"sampling.min_p": "1.0"}),
    "min_p not a number": (request(sampling=Sampling(min_p=NAN)), {"sampling.min_p": "nan"}),
    "repetition penalty zero": (request(sampling=Sampling(repetition_penalty=0)), {"sampling.repetition_penalty": "0.0"}),
    "presence penalty": (request(sampling=Sampling(presence_penalty=2.1)), {"sampling.presence_penalty": "2.1"}),
    "frequency penalty": (request(sampling=Sampling(frequency_penalty=NAN)), {"sampling.frequency_penalty": "nan"}),
    "bias out of range": (request(sampling=Sampling(logit_bias={5: 101})), {"sampling.logit_bias[5]": "101"}),
    "bias not a number": (request(sampling=Sampling(logit_bias={5: NAN})), {"sampling.logit_bias[5]": "nan"}),
    "bias of no token": (request(sampling=Sampling(logit_bias={512: 1})), {"sampling.logit_bias[512]": "no such"}),
    "max_tokens zero": (request(max_tokens=0), {"max_tokens": "0; expected at least 1"}),
    "max_tokens beyond the context": (request(max_tokens=MAX_CONTEXT), {"max_tokens": "leave"}),
    "too many stop strings": (request(stop=["x"] * 17), {"stop": "17"}),
    "empty stop string": (request(stop=["x", ""]), {"stop[1]": "empty"}),
    "endless stop string": (request(stop=["x" * 2000]), {"stop[0]": "2000"}),
    "stop token beyond the vocabulary": (request(stop_token_ids=[1, 600]), {"stop_token_ids[1]": "600"}),
    "unknown drafter": (request(decoding=Override(mode=SPECULATIVE, drafter="eagle")), {"decoding.drafter": "is no drafter here; known: ngram"}),
    "k zero": (request(decoding=Override(mode=SPECULATIVE, k=0)), {"decoding.k": "0; expected 1 to 64"}),
    "k too large": (request(decoding=Override(mode=SPECULATIVE, k=65)), {"decoding.k": "65"}),
    "k when plain": (request(decoding=Override(mode=PLAIN, k=4)), {"decoding.k": "only with mode"}),
    "drafter when automatic": (request(decoding=Override(drafter="ngram")), {"decoding.drafter": "only with mode"}),
    "unknown mode": (request(decoding=Override(mode=9)), {"decoding.mode": "9"}),
    "unknown task": (request(task_type="poetry"), {"task_type": "'poetry'"}),
    "long request id": (request(request_id="x" * 129), {"request_id": "129"}),
    "request id that breaks lines": (request(request_id="a\nb"), {"request_id": "'a\\nb'"}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_names_the_field_its_value_and_what_would_be_right(
    served: tuple[Client, RunningVerify], case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Exactly the wrong field, no other; the verify tier hears nothing and the log stays quiet."""
    client, verify = served
    asked = len(verify.servicer.requests)
    with caplog.at_level(logging.INFO):
        bad, expected = BAD[case]
        found = await violations(client, bad)
    assert found.keys() == expected.keys()
    for field, words in expected.items():
        assert words in found[field]
        assert len(found[field]) < 200
    assert len(verify.servicer.requests) == asked
    assert not caplog.records


async def test_all_that_is_wrong_is_said_at_once(served: tuple[Client, RunningVerify]) -> None:
    """One round trip is enough to mend a request."""
    bad = request(
        text="12 " * 100,
        sampling=Sampling(temperature=-1, top_p=2, min_p=-1, logit_bias={999: NAN}),
        stop=[""],
        task_type="?",
        decoding=Override(k=0),
        request_id="x" * 200,
    )
    found = await violations(served[0], bad)
    assert set(found) == {
        "text",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.logit_bias[999]",
        "stop[0]",
        "task_type",
        "decoding.k",
        "request_id",
    }


async def test_a_list_full_of_wrong_elements_does_not_flood_the_answer(
    served: tuple[Client, RunningVerify],
) -> None:
    """A few are named, the rest is counted: a status has to fit in 8 KiB of metadata."""
    bad = request(
        tokens=router_pb2.TokenInput(ids=[100_000] * 200),
        stop=[""] * 500,
        stop_token_ids=[9999] * 500,
        sampling=Sampling(logit_bias={1000 + i: NAN for i in range(300)}),
    )
    found = await violations(served[0], bad)
    assert "196 more" in found["tokens.ids"]
    assert len(found) <= 20


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("request", lambda r, extra: r.MergeFromString(extra)),
        ("sampling", lambda r, extra: r.sampling.MergeFromString(extra)),
        ("decoding", lambda r, extra: r.decoding.MergeFromString(extra)),
        ("chat.messages[1]", lambda r, extra: r.chat.messages[1].MergeFromString(extra)),
    ],
)
async def test_a_field_of_a_newer_client_is_refused_by_number(served, path: str, place) -> None:
    """Ignoring it would answer another question than was asked."""
    bad = request(chat=chat(("user", "Hi"), ("user", "there"))) if path.startswith("chat") else request()
    place(bad, b"\x98\x06\x01")  # field 99, varint 1
    found = await violations(served[0], bad)
    assert found == {path: "field number 99: not known to this version; leave it out or ask a newer server"}


async def test_ten_megabytes_are_refused_quickly_without_being_tokenised(
    served: tuple[Client, RunningVerify], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size alone says that it cannot fit."""
    monkeypatch.setattr(type(tokenizer()), "encode", lambda *_: pytest.fail("tokenised"))
    started = time.monotonic()
    found = await violations(served[0], request(text="a" * 10_000_000))
    assert time.monotonic() - started < 10.0
    assert "10000000 bytes" in found["text"]
    found = await violations(served[0], request(chat=chat(("user", "é" * 5_000_000))))
    assert "10000000 bytes" in found["chat.messages"]


async def test_bad_utf8_names_the_field(served: tuple[Client, RunningVerify]) -> None:
    """Bytes that are no text are the caller's fault."""
    assert "text" in await violations(served[0], b"\x0a\x02\xff\xfe")


async def test_the_largest_prompt_that_fits_is_taken(served: tuple[Client, RunningVerify]) -> None:
    """One token of output is left."""
    answer = await ask(served[0], token_ids=[5] * (MAX_CONTEXT - 1))
    assert answer.finished.usage.completion_tokens == 1


async def test_known_facts_judge_bad_input_while_no_replica_is_there() -> None:
    """A wrong request is wrong, a right one may try again later."""
    async with pair(Script(output=[70])) as (client, verify):
        await ask(client, max_tokens=1)
        await verify.stop()
        assert "max_tokens" in await violations(client, request(max_tokens=0))
        with pytest.raises(PeerLostError, match="verify replica 127") as caught:
            await ask(client, max_tokens=1)
        assert caught.value.retry_after_s > 0
        with pytest.raises(PeerLostError):
            await ask(client, max_tokens=1)


async def test_a_replica_with_another_tokenizer_is_refused_in_words() -> None:
    """Not the vocabulary's size, its content."""
    async with pair(Script(output=[70], tokenizer_fingerprint="f" * 64)) as (client, _):
        with pytest.raises(IncompatiblePeerError, match="another tokenizer than this router"):
            await ask(client, max_tokens=1)
        with pytest.raises(IncompatiblePeerError):
            await client.server_info()


async def test_questions_about_the_server_refuse_unknown_fields_too(
    served: tuple[Client, RunningVerify],
) -> None:
    """The same rule for every method."""
    bad = router_pb2.ListRequestsRequest()
    bad.MergeFromString(b"\x98\x06\x01")
    async with open_channel(served[0].address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router_pb2_grpc.RouterServiceStub(channel).ListRequests(bad)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_millions_of_tiny_messages_hold_nobody_up(served: tuple[Client, RunningVerify]) -> None:
    """8 MB of empty chat messages are refused by their number; the event loop is not kept from the others."""
    import asyncio

    client, _ = served
    count = 4_000_000
    body = b"\x0a\x00" * count
    length, size = b"", len(body)
    while size >= 0x80:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    slowest, done = 0.0, False

    async def watch() -> None:
        nonlocal slowest
        while not done:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            slowest = max(slowest, time.monotonic() - began)

    watching = asyncio.create_task(watch())
    refused = await violations(client, b"\x12" + length + bytes([size]) + body)
    done = True
    await watching
    assert list(refused) == ["chat.messages"]
    assert slowest < 10.0  # it was 30 s


async def test_a_chat_of_thousands_of_turns_holds_nobody_up(
    served: tuple[Client, RunningVerify], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template takes half a second for them, however short they are: beside the event loop, as a long text is read."""
    from paceline.tokenizer import Tokenizer

    threads = []

    def seen(self: Tokenizer, messages: list[tuple[str, str]]) -> list[int]:
        threads.append(threading.current_thread())
        return [1] * 10 * len(messages)

    monkeypatch.setattr(Tokenizer, "encode_chat", seen)
    for turns, aside in ((2, False), (1000, True)):
        chat = router_pb2.ChatInput(messages=[router_pb2.ChatMessage(role="user", content="a")] * turns)
        request = router_pb2.GenerateRequest(chat=chat, max_tokens=2**31)
        assert await violations(served[0], request)
        assert (threads.pop() is not threading.main_thread()) is aside


async def test_a_text_of_a_few_pages_holds_nobody_up(
    served: tuple[Client, RunningVerify], monkeypatch: pytest.MonkeyPatch
) -> None:
    """16,000 digits take the tokenizer 30 ms: beside the event loop; a short text is not worth a thread."""
    from paceline.tokenizer import Tokenizer

    threads = []

    def seen(self: Tokenizer, text: str) -> list[int]:
        threads.append(threading.current_thread())
        return [1] * 2 * MAX_CONTEXT

    monkeypatch.setattr(Tokenizer, "encode", seen)
    for characters, aside in ((200, False), (3000, True)):
        assert await violations(served[0], request(text="7" * characters))
        assert (threads.pop() is not threading.main_thread()) is aside


async def test_a_chat_with_every_private_character_is_answered(served: tuple[Client, RunningVerify]) -> None:
    """The template needs one character that the text does not use: without one there is an error, not a hang."""
    from paceline.errors import InvalidRequestError

    text = "".join(chr(code) for code in range(0x100000, 0x10FFFE))
    with pytest.raises(InvalidRequestError):
        tokenizer().encode_chat([("user", text)])

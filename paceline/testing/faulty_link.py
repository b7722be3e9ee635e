"""A wire between a verify and a draft replica that does what wires and peers do at their worst, message by message."""

import asyncio
import random
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

from paceline.serving.channel import open_channel
from paceline.v1 import draft_pb2 as pb
from paceline.v1 import draft_pb2_grpc

Message = TypeVar("Message", pb.LinkRequest, pb.LinkResponse)
Spoil = Callable[[Any], list[Any]]


def untouched(message: Any) -> list[Any]:
    """As it came."""
    return [message]


class FaultyLink(draft_pb2_grpc.DraftServiceServicer):
    """Relays links to ``endpoint``; greetings always pass, all else goes through ``spoil`` both ways.

    ``delay_s``: what goes toward the verify replica comes so much later, in its order. ``hang``/``go_on``: nothing passes.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.spoil: Spoil = untouched
        self.delay_s = 0.0
        self._flows = asyncio.Event()
        self._flows.set()

    def hang(self) -> None:
        """From now on nothing passes, and nothing says so."""
        self._flows.clear()

    def go_on(self) -> None:
        """What was held passes, and all that comes."""
        self._flows.set()

    async def Link(  # noqa: N802  # the protocol's name
        self, requests: AsyncIterator[pb.LinkRequest], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.LinkResponse]:
        """See draft.proto."""
        async with open_channel(self._endpoint) as channel:
            stream = draft_pb2_grpc.DraftServiceStub(channel).Link(self._relayed(requests))
            async for response in self._relayed(stream, late=True):
                yield response

    async def _relayed(
        self, messages: AsyncIterable[Message], *, late: bool = False
    ) -> AsyncIterator[Message]:
        """``messages`` with what happens to them on the way; ``late``: they come with the delay of the moment."""
        clock = asyncio.get_running_loop().time
        waiting: asyncio.Queue[tuple[float, Message] | None] = asyncio.Queue()

        async def read() -> None:
            try:
                async for message in messages:
                    greets = message.WhichOneof("message") in {"hello", "welcome"}
                    for one in [message] if greets else self.spoil(message):
                        waiting.put_nowait((clock() + (self.delay_s if late else 0.0), one))
            finally:
                waiting.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (entry := await waiting.get()) is not None:
                due, message = entry
                await asyncio.sleep(max(0.0, due - clock()))
                await self._flows.wait()
                yield message
            await reading
        finally:
            reading.cancel()


@asynccontextmanager
async def faulty_link(endpoint: str) -> AsyncIterator[tuple[str, FaultyLink]]:
    """A relay to ``endpoint`` on a free port; gives its address and the relay."""
    relay = FaultyLink(endpoint)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    draft_pb2_grpc.add_DraftServiceServicer_to_server(relay, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", relay
    finally:
        await server.stop(0)


class Mischief:
    """Drops, doubles, reorders and repeats messages, and spoils entries: epochs, lengths, tokens, k. Keyed by ``seed``."""

    def __init__(self, seed: int, share: float) -> None:
        """``share``: of the messages that something happens to."""
        self._dice = random.Random(seed)
        self._share = share
        self._seen: list[pb.LinkRequest | pb.LinkResponse] = []
        self._held: list[pb.LinkRequest | pb.LinkResponse] = []
        self.num_spoilt = 0

    def __call__(self, message: pb.LinkRequest | pb.LinkResponse) -> list[pb.LinkRequest | pb.LinkResponse]:
        """What is delivered instead."""
        dice, kind = self._dice, type(message)
        self._seen = [*self._seen[-30:], message]
        held = [one for one in self._held if isinstance(one, kind)]
        self._held = [one for one in self._held if not isinstance(one, kind)]
        if dice.random() >= self._share:
            return [message, *held]
        self.num_spoilt += 1
        match dice.choice(["drop", "double", "hold", "repeat", "spoil", "spoil"]):
            case "drop":
                return held
            case "double":
                return [message, message, *held]
            case "hold":
                self._held.append(message)
                return held
            case "repeat":
                old = [one for one in self._seen if isinstance(one, kind)]
                return [message, dice.choice(old), *held]
        copy = kind.FromString(message.SerializeToString())
        self._spoil_entry(copy)
        return [copy, *held]

    def _spoil_entry(self, message: pb.LinkRequest | pb.LinkResponse) -> None:
        entries: list[Any] = (
            [*message.update.opens, *message.update.commits]
            if isinstance(message, pb.LinkRequest)
            else [*message.proposals.proposals]
        )
        if not entries:
            return
        dice, entry = self._dice, self._dice.choice(entries)
        match dice.choice(["epoch", "base_len", "tokens", "vocabulary", "k", "sequence"]):
            case "epoch":
                entry.epoch = max(0, entry.epoch + dice.choice([-1, 1]))
            case "base_len" if not isinstance(entry, pb.SequenceOpen):
                entry.base_len = max(0, entry.base_len + dice.choice([-2, -1, 1, 5]))
            case "tokens":
                del entry.token_ids[:]
            case "vocabulary":
                entry.token_ids.append(4_000_000_000)
            case "k" if not isinstance(entry, pb.Proposal):
                entry.k = 4_000_000
            case _:
                entry.sequence_id += 1000

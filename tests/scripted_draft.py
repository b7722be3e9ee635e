"""A draft replica that misbehaves on purpose, as a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from paceline.v1 import draft_pb2, draft_pb2_grpc

Reply = Callable[["Asked"], list[draft_pb2.LinkResponse]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: the sequence as the link has told it so far."""

    sequence_id: int
    epoch: int
    tokens: tuple[int, ...]
    k: int

    def proposal(self, *tokens: int, **changes: int) -> draft_pb2.Proposal:
        """An answer with a right stamp, unless ``changes`` spoil it."""
        stamp = {"sequence_id": self.sequence_id, "epoch": self.epoch, "base_len": len(self.tokens)}
        return draft_pb2.Proposal(token_ids=tokens, residence_s=0.001, **(stamp | changes))


def proposals(*entries: draft_pb2.Proposal) -> draft_pb2.LinkResponse:
    """One message."""
    return draft_pb2.LinkResponse(proposals=draft_pb2.LinkProposals(proposals=entries))


def refusal(asked: Asked, reason: draft_pb2.RefusalReason.ValueType) -> draft_pb2.LinkResponse:
    """A refusal of the sequence."""
    entry = draft_pb2.SequenceRefusal(
        sequence_id=asked.sequence_id, epoch=asked.epoch, reason=reason, message="on purpose"
    )
    return draft_pb2.LinkResponse(proposals=draft_pb2.LinkProposals(refusals=[entry]))


@dataclass
class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Answers each question with ``reply``; ``delay_s`` holds every answer back."""

    reply: Reply
    delay_s: float = 0.0
    max_level: int = 0
    links: int = 0
    opens: int = 0
    questions: int = 0
    closes: int = 0
    live: dict[int, tuple[int, list[int]]] = field(default_factory=dict)

    async def Link(
        self, requests: AsyncIterator[draft_pb2.LinkRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[draft_pb2.LinkResponse]:
        """See draft.proto, as far as it is kept."""
        async for request in requests:
            if request.HasField("hello"):
                self.links += 1
                offer = draft_pb2.DrafterOffer(
                    name="scripted", version="1", max_level=self.max_level, device="elsewhere"
                )
                yield draft_pb2.LinkResponse(welcome=draft_pb2.LinkWelcome(draft_id="x", drafters=[offer]))
                continue
            for entry in request.update.opens:
                self.opens += 1
                self.live[entry.sequence_id] = (entry.epoch, list(entry.token_ids))
                for response in await self._answer(entry.sequence_id, entry.k):
                    yield response
            for entry in request.update.commits:
                if entry.sequence_id in self.live:
                    self.live[entry.sequence_id][1].extend(entry.token_ids)
                    for response in await self._answer(entry.sequence_id, entry.k):
                        yield response
            for entry in request.update.closes:
                self.closes += 1
                if entry.epoch >= self.live.get(entry.sequence_id, (0, []))[0]:
                    self.live.pop(entry.sequence_id, None)

    async def _answer(self, sequence_id: int, k: int) -> list[draft_pb2.LinkResponse]:
        if not k:
            return []
        self.questions += 1
        epoch, tokens = self.live[sequence_id]
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return self.reply(Asked(sequence_id, epoch, tuple(tokens), k))


@asynccontextmanager
async def scripted_draft(servicer: ScriptedDraft, port: int = 0) -> AsyncIterator[str]:
    """A server with it; gives host:port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)

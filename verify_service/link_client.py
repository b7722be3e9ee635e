"""The verify replica's end of one ``DraftService.Link`` stream: connects, greets, reads, writes, connects again.

Runs on the event loop; the engine thread writes through ``open``, ``commit``, ``close`` and ``flush``. What arrives
goes to the engine's inbox as values. Nothing that a draft replica does here can raise into the engine.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import grpc

from paceline import codec
from paceline.link import MAX_LEVEL, Lookahead, Stamp
from paceline.serving.channel import open_channel
from paceline.simulation import MODEL_NAME
from paceline.types import DraftDistribution
from paceline.v1 import draft_pb2, draft_pb2_grpc
from verify_service.link_port import Offer, Proposal, Refusal
from verify_service.sequence import Sequence

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 1.0
REFUSED_RETRY_S = 30.0  # another tokenizer does not go away by itself
MAX_UNSENT = 256  # messages; a draft replica that does not read for so long is cut off

_REFUSALS = {
    draft_pb2.REFUSAL_REASON_OUT_OF_SYNC: Refusal.RESYNC,
    draft_pb2.REFUSAL_REASON_CAPACITY: Refusal.LATER,
}


_Outbox = asyncio.Queue[draft_pb2.LinkRequest | None]


class DrafterMemory(NamedTuple):
    """What a drafter takes, in bytes, and whether of the target's device."""

    weights_bytes: int
    kv_bytes_per_token: int
    shared: bool


class LinkEvents:
    """What the client hands over, each call from the event loop."""

    def __init__(
        self,
        up: Callable[["LinkClient", dict[str, Offer]], None],
        down: Callable[[str], None],
        proposed: Callable[[str, list[Proposal], float], None],
        refused: Callable[[str, int, int, Refusal], None],
    ) -> None:
        self.up, self.down, self.proposed, self.refused = up, down, proposed, refused


class LinkClient:
    """One draft replica, for as long as the verify replica lives; a ``LinkPort`` for the engine thread."""

    def __init__(
        self,
        endpoint: str,
        hello: draft_pb2.LinkHello,
        events: LinkEvents,
        shares: Callable[[str, str], bool],
    ) -> None:
        """``shares(host, device)``: whether a drafter there would slow the target model down."""
        self.endpoint = endpoint
        self.memory: dict[str, DrafterMemory] = {}
        """By drafter, as last offered."""
        self._hello = hello
        self._shares = shares
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._up_at = 0.0  # monotonic
        self._update = draft_pb2.LinkUpdate()  # engine thread only
        self._outbox: _Outbox | None = None  # event loop only

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            was_up = False
            try:
                was_up = await self._converse()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    log.error(
                        "draft replica refused", extra={"endpoint": self.endpoint, "why": error.details()}
                    )
                    await asyncio.sleep(REFUSED_RETRY_S)
                    continue
                was_up = self._outbox is not None
            except Exception:
                # Bytes that are no message, a fault of our own: the link is made anew, its sequences go on plainly.
                log.exception("link failed", extra={"endpoint": self.endpoint})
                was_up = False
            finally:
                if self._outbox is not None:
                    self._outbox = None
                    self._events.down(self.endpoint)
            if was_up:
                log.warning("link down", extra={"endpoint": self.endpoint})
            retry_s = FIRST_RETRY_S if was_up else min(2 * retry_s, LONGEST_RETRY_S)
            await asyncio.sleep(retry_s)

    async def _converse(self) -> bool:
        # A channel of its own for each try: a shared one would impose its own back-off on reconnecting.
        async with open_channel(self.endpoint) as channel:
            outbox: _Outbox = asyncio.Queue()
            outbox.put_nowait(draft_pb2.LinkRequest(hello=self._hello))
            stream = draft_pb2_grpc.DraftServiceStub(channel).Link(_drain(outbox))
            try:
                async for response in stream:
                    at = time.monotonic()
                    match response.WhichOneof("message"):
                        case "welcome" if self._outbox is None:
                            self._outbox, self._up_at = outbox, at
                            self._welcomed(response.welcome)
                        case "proposals" if self._outbox is not None:
                            self._received(response.proposals, at)
                        case _:
                            log.warning("unexpected message on the link", extra={"endpoint": self.endpoint})
                    if outbox.qsize() > MAX_UNSENT:
                        log.warning("draft replica does not read", extra={"endpoint": self.endpoint})
                        break
            finally:
                stream.cancel()
                outbox.put_nowait(None)
        return self._outbox is not None

    def _welcomed(self, welcome: draft_pb2.LinkWelcome) -> None:
        self.memory = {
            offer.name: DrafterMemory(
                offer.weights_bytes,
                offer.kv_bytes_per_token,
                # A simulated pair's sizes are those of one device, whatever its clocks say.
                offer.device == MODEL_NAME or self._shares(welcome.host, offer.device),
            )
            for offer in welcome.drafters
        }
        log.info("link up", extra={"endpoint": self.endpoint, "draft_id": welcome.draft_id})
        self._events.up(
            self,
            {
                offer.name: Offer(
                    offer.version,
                    offer.max_context,
                    min(offer.max_level, MAX_LEVEL),
                    offer.one_pass,
                    self._shares(welcome.host, offer.device),
                    offer.prompt_tokens,
                )
                for offer in welcome.drafters
            },
        )

    def _received(self, message: draft_pb2.LinkProposals, at: float) -> None:
        for refusal in message.refusals:
            log.info(
                "sequence refused by draft replica",
                extra={"endpoint": self.endpoint, "sequence": refusal.sequence_id, "why": refusal.message},
            )
            reason = _REFUSALS.get(refusal.reason, Refusal.FINAL)
            self._events.refused(self.endpoint, refusal.sequence_id, refusal.epoch, reason)
        up_s = at - self._up_at
        proposals = [
            Proposal(
                Stamp(p.sequence_id, p.epoch, p.base_len),
                list(p.token_ids),
                _believable(p.residence_s, up_s),
                tuple(DraftDistribution(tuple(d.token_ids), tuple(d.probabilities)) for d in p.distributions),
                _believable(p.draft_s, up_s),
                tuple(p.assumed_ids),
            )
            for p in message.proposals
        ]
        if proposals:
            self._events.proposed(self.endpoint, proposals, at)

    # --- LinkPort: engine thread ------------------------------------------------------------------------------

    def open(self, sequence: Sequence, epoch: int, k: int, lookahead: Lookahead) -> None:
        """See ``LinkPort``."""
        spec = sequence.spec
        self._update.opens.add(
            sequence_id=sequence.id,
            epoch=epoch,
            drafter=spec.plan.drafter,
            token_ids=sequence.tokens,
            prompt_len=len(spec.prompt_ids),
            sampling=codec.sampling_to_pb(spec.sampling),
            k=k,
            round=sequence.stats.num_rounds,
            traceparent=spec.trace.to_traceparent() if spec.trace else "",
            law=codec.law_to_pb(sequence.law),
            scope=scope_of(spec.tenant),
            level=lookahead.level,
            fan=lookahead.fan,
        )

    def commit(
        self, stamp: Stamp, token_ids: list[int], k: int, round_index: int, lookahead: Lookahead
    ) -> None:
        """See ``LinkPort``."""
        self._update.commits.add(
            sequence_id=stamp.sequence_id,
            epoch=stamp.epoch,
            base_len=stamp.base_len,
            token_ids=token_ids,
            k=k,
            round=round_index,
            level=lookahead.level,
            fan=lookahead.fan,
        )

    def close(self, sequence_id: int, epoch: int) -> None:
        """See ``LinkPort``."""
        self._update.closes.add(sequence_id=sequence_id, epoch=epoch)

    def flush(self) -> None:
        """See ``LinkPort``."""
        if not self._update.ByteSize():
            return
        update, self._update = self._update, draft_pb2.LinkUpdate()
        self._loop.call_soon_threadsafe(self._send, draft_pb2.LinkRequest(update=update))

    def _send(self, request: draft_pb2.LinkRequest) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(request)


async def _drain(outbox: _Outbox) -> AsyncIterator[draft_pb2.LinkRequest]:
    # Ends by a None: grpc.aio does not end the iterator of a call that is over.
    while (request := await outbox.get()) is not None:
        yield request


def scope_of(tenant: str) -> str:
    """Stands for a tenant on the link: the draft tier keeps tenants apart and need not know their names."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]


def _believable(seconds: float, up_s: float) -> float:
    """A duration as a peer tells it, or 0 where it cannot be one: nobody has worked for us longer than the link is up."""
    return seconds if math.isfinite(seconds) and 0 <= seconds <= up_s else 0.0

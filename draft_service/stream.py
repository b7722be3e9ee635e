"""One Link stream: reads updates, keeps the mirrors, writes proposals. When it ends, for whatever reason, so do they."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from draft_service.meter import DraftMeter
from draft_service.mirror import Ask, LinkMirrors, Mirror, Opening
from draft_service.news import Answer, Drafted, Refused, Taken
from draft_service.refusal import Refusal, RefusalReason
from paceline.codec import law_from_pb, sampling_from_pb
from paceline.errors import InvalidRequestError
from paceline.link import Lookahead, Stamp
from paceline.telemetry import MAX_ROUND_SPANS, Telemetry, TraceContext, names, round_context
from paceline.v1 import draft_pb2 as pb

log = logging.getLogger(__name__)

# A peer that does not read its proposals is not read either, once so many wait for it.
MAX_UNSENT = 4096

_REASONS = {
    RefusalReason.UNKNOWN_DRAFTER: pb.REFUSAL_REASON_UNKNOWN_DRAFTER,
    RefusalReason.CAPACITY: pb.REFUSAL_REASON_CAPACITY,
    RefusalReason.CONTEXT: pb.REFUSAL_REASON_CONTEXT,
    RefusalReason.OUT_OF_SYNC: pb.REFUSAL_REASON_OUT_OF_SYNC,
    RefusalReason.MALFORMED: pb.REFUSAL_REASON_MALFORMED,
    RefusalReason.INTERNAL: pb.REFUSAL_REASON_INTERNAL,
}


@dataclass(frozen=True, slots=True)
class _Guess:
    """An answer on its way out."""

    mirror: Mirror
    drafted: Drafted


class LinkStream:
    """See the module. Lives on one event loop; only ``deliver`` may be called from elsewhere."""

    def __init__(
        self, *, telemetry: Telemetry, clock: Callable[[], float], meter: DraftMeter | None = None
    ) -> None:
        self._meter = meter
        self._telemetry = telemetry
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._unsent: list[_Guess | Refusal] = []
        self._something = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._over = asyncio.Event()
        self._mirrors: LinkMirrors | None = None

    @property
    def num_mirrors(self) -> int:
        """Sequences mirrored for this peer."""
        return len(self._mirrors) if self._mirrors is not None else 0

    def end(self) -> None:
        """Let the stream end in good order."""
        self._over.set()

    def deliver(self, answers: list[Answer]) -> None:
        """Take a worker's answers; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._receive, answers)
        except RuntimeError:  # the loop is closed: the process ends, nobody reads any more
            return

    async def run(self, mirrors: LinkMirrors, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Serve until the peer leaves or ``end`` is called. Raises InvalidRequestError for a second hello."""
        self._mirrors = mirrors
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(mirrors, context))
                writer = tasks.create_task(self._write(context))
                await self._over.wait()
                reader.cancel()
                writer.cancel()
        finally:
            self._over.set()
            mirrors.release()

    # --- in ---------------------------------------------------------------------------------------------------

    async def _read(self, mirrors: LinkMirrors, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        while True:
            await self._room.wait()
            try:
                request = await context.read()
            except InvalidRequestError as error:
                # Bytes that are no message: whatever they spoke of will show as a gap, the others go on.
                log.warning("unreadable message on a link, skipped", extra={"fault": str(error)})
                continue
            if request is grpc.aio.EOF:
                break
            if request.HasField("hello"):
                raise InvalidRequestError.single("hello", "only the first message of a link may be a hello")
            if request.HasField("update"):
                self._send(self._applied(mirrors, request.update))
        self._over.set()

    def _applied(self, mirrors: LinkMirrors, update: pb.LinkUpdate) -> Sequence[Refusal]:
        """Apply each entry on its own; the refusals."""
        arrived = self._clock()
        refusals: list[Refusal | None] = []
        for entry in update.opens:
            opening = Opening(
                entry.drafter,
                list(entry.token_ids),
                entry.prompt_len,
                sampling_from_pb(entry.sampling),
                self._traced(entry.traceparent),
                entry.scope,
                law_from_pb(entry.law),
            )
            ask = Ask(entry.k, entry.round, Lookahead(entry.level, entry.fan))
            refusals.append(mirrors.open(entry.sequence_id, entry.epoch, opening, ask, arrived))
        for commit in update.commits:
            stamp = Stamp(commit.sequence_id, commit.epoch, commit.base_len)
            ask = Ask(commit.k, commit.round, Lookahead(commit.level, commit.fan))
            refusals.append(mirrors.commit(stamp, list(commit.token_ids), ask, arrived))
        for close in update.closes:
            mirrors.close(close.sequence_id, close.epoch)
        mirrors.flush()
        return [refusal for refusal in refusals if refusal is not None]

    def _traced(self, traceparent: str) -> TraceContext | None:
        """The verify tier's decode span, if anybody wants spans."""
        if not (traceparent and self._telemetry.enabled):
            return None
        decode = TraceContext.from_traceparent(traceparent)
        return decode if decode is not None and decode.sampled else None

    # --- out --------------------------------------------------------------------------------------------------

    def _receive(self, answers: Sequence[Answer]) -> None:
        mirrors = self._mirrors
        if mirrors is None or self._over.is_set():
            return
        outgoing: list[_Guess | Refusal] = []
        for answer in answers:
            mirror = mirrors.by_handle(answer.handle)
            if mirror is None:  # closed, or opened anew, while the drafter was at it
                continue
            if isinstance(answer, Refused):
                outgoing.append(mirrors.refused_by_worker(mirror, answer.reason, answer.message))
            elif isinstance(answer, Taken):
                self._record(mirror, answer.block, answer.ended)
            else:
                outgoing.append(_Guess(mirror, answer))
        self._send(outgoing)

    def _send(self, outgoing: Sequence[_Guess | Refusal]) -> None:
        if not outgoing:
            return
        self._unsent += outgoing
        self._something.set()
        if len(self._unsent) >= MAX_UNSENT:  # what was drafted ahead is dropped first
            self._unsent = [one for one in self._unsent if isinstance(one, Refusal) or not one.drafted.pushed]
        if len(self._unsent) >= MAX_UNSENT:
            self._room.clear()

    async def _write(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Everything that waits goes out as one message."""
        while True:
            await self._something.wait()
            self._something.clear()
            unsent, self._unsent = self._unsent, []
            await context.write(pb.LinkResponse(proposals=self._message(unsent)))
            self._room.set()

    def _message(self, unsent: Sequence[_Guess | Refusal]) -> pb.LinkProposals:
        message = pb.LinkProposals()
        now = self._clock()
        for entry in unsent:
            if isinstance(entry, Refusal):
                if self._meter is not None:
                    self._meter.refusals[entry.reason.value] += 1
                message.refusals.add(
                    sequence_id=entry.sequence_id,
                    epoch=entry.epoch,
                    reason=_REASONS[entry.reason],
                    message=entry.message,
                )
                continue
            mirror, drafted = entry.mirror, entry.drafted
            arrived = drafted.question.arrived
            message.proposals.add(
                sequence_id=mirror.sequence_id,
                epoch=mirror.epoch,
                base_len=drafted.base_len,
                token_ids=drafted.token_ids,
                queue_s=drafted.started - arrived,
                draft_s=drafted.draft_s,
                residence_s=now - arrived,
                distributions=[
                    pb.DraftDistribution(token_ids=d.token_ids, probabilities=d.probs)
                    for d in drafted.distributions
                ],
                assumed_ids=drafted.assumed_ids,
            )
            if self._meter is not None:
                self._meter.answered(
                    mirror.drafter,
                    len(drafted.token_ids),
                    draft_s=drafted.draft_s,
                    queue_s=drafted.started - arrived,
                    residence_s=now - arrived,
                    ahead=drafted.pushed,
                )
            if not drafted.pushed:  # of many blocks drafted ahead at most one is used
                self._record(mirror, drafted, now)
        return message

    def _record(self, mirror: Mirror, drafted: Drafted, ended: float) -> None:
        """The span ``draft``: the whole stay here, as the round's record counts it.

        One that was pushed ahead began and ended before its round: that is what is to be seen.
        """
        question = drafted.question
        if mirror.decode is None or question.round_index >= MAX_ROUND_SPANS:
            return
        parent = round_context(mirror.decode, question.round_index)
        self._telemetry.record(
            names.SPAN_DRAFT,
            self._telemetry.child(parent),
            parent=parent,
            start=question.arrived,
            end=ended,
            attributes={
                names.ROUND_INDEX: question.round_index,
                names.ROUND_BASE_LEN: drafted.base_len,
                names.ROUND_DRAFTER: mirror.drafter,
                names.DRAFT_TOKENS: len(drafted.token_ids),
                names.DRAFT_QUEUE_S: drafted.started - question.arrived,
                names.DRAFT_S: drafted.draft_s,
                names.DRAFT_AHEAD: drafted.pushed,
                names.SEQUENCE_ID: str(mirror.sequence_id),
                names.EPOCH: mirror.epoch,
            },
        )

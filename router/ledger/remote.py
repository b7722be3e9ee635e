"""The ledger's writer behind a socket: what routers that share one ask, and who answers.

The servicer is the keeper's; the client is a ``Writer`` for a router's memory.
"""

import asyncio
import hashlib
import time

import grpc
import numpy as np

from paceline.errors import InvalidRequestError
from paceline.ranges import some
from paceline.serving.channel import error_from_rpc, open_channel
from paceline.v1 import ledger_pb2, ledger_pb2_grpc
from router.ledger.book import Cell
from router.ledger.countable import batch_violations, document_violations
from router.ledger.group import GROUP_FIELDS, Group
from router.ledger.keeper import Batch, Keeper, News, Update
from router.ledger.store import Audit
from router.ledger.sums import FIELDS, Row

SERVICE = ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"].full_name
_TIMEOUT_S = 5.0
_DEFAULT_AUDITS = 20
_SHAPE = hashlib.blake2b(repr((FIELDS, GROUP_FIELDS)).encode(), digest_size=8).hexdigest()
"""Two programs that count different things must not mix."""


class LedgerService(ledger_pb2_grpc.LedgerServiceServicer):
    """The servicer; one per ledger."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def Exchange(  # noqa: N802
        self,
        request: ledger_pb2.ExchangeRequest,
        context: grpc.aio.ServicerContext[ledger_pb2.ExchangeRequest, ledger_pb2.ExchangeResponse],
    ) -> ledger_pb2.ExchangeResponse:
        """See ledger.proto."""
        if request.fields != _SHAPE:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this ledger counts other things than the router: upgrade one of them",
            )
        if request.batch:
            if wrong := [*some(batch_violations(request, time.time()), "updates")]:
                raise InvalidRequestError(wrong)
            updates = [
                Update(
                    Group(*update.group.values),
                    update.at,
                    np.array(update.sums, dtype=np.int64),
                    {(b.metric, b.number): b.requests for b in update.bins},
                )
                for update in request.updates
            ]
            await asyncio.wrap_future(self._keeper.take(Batch(request.source, request.batch, updates)))
        news = await asyncio.wrap_future(self._keeper.news(request.epoch, request.since))
        return ledger_pb2.ExchangeResponse(
            epoch=news.epoch,
            version=news.version,
            rows=[
                ledger_pb2.LedgerRow(group=_group(c.group), span=c.span, start=c.start, sums=row.tolist())
                for c, row in news.rows
            ],
            documents=news.documents,
        )

    async def PutDocument(  # noqa: N802
        self, request: ledger_pb2.PutDocumentRequest, context: object
    ) -> ledger_pb2.PutDocumentResponse:
        """See ledger.proto."""
        if wrong := [*document_violations(request, self._keeper.for_operators)]:
            raise InvalidRequestError(wrong)
        audit = Audit(time.time(), "rule", request.subject, request.words, {})
        written, value = await asyncio.wrap_future(
            self._keeper.replace_document(request.name, request.expected, request.value, [audit])
        )
        return ledger_pb2.PutDocumentResponse(written=written, value=value)

    async def ListAudit(  # noqa: N802
        self, request: ledger_pb2.ListAuditRequest, context: object
    ) -> ledger_pb2.ListAuditResponse:
        """See ledger.proto."""
        audits = await asyncio.wrap_future(self._keeper.audits(request.limit or _DEFAULT_AUDITS))
        return ledger_pb2.ListAuditResponse(
            records=[
                ledger_pb2.LedgerAudit(at=a.at, kind=a.kind, subject=a.subject, words=a.words) for a in audits
            ]
        )


class RemoteKeeper:
    """A ``Writer`` at an address. Lives on one event loop."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub: ledger_pb2_grpc.LedgerServiceAsyncStub = ledger_pb2_grpc.LedgerServiceStub(self._channel)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def exchange(self, batch: Batch | None, epoch: str, since: int) -> News:
        """See ``Writer``."""
        request = ledger_pb2.ExchangeRequest(epoch=epoch, since=since, fields=_SHAPE)
        if batch is not None:
            request.source, request.batch = batch.source, batch.number
            request.updates.extend(
                ledger_pb2.LedgerUpdate(
                    group=_group(update.group),
                    at=update.at,
                    sums=update.row.tolist(),
                    bins=[
                        ledger_pb2.LedgerBin(metric=metric, number=number, requests=requests)
                        for (metric, number), requests in update.bins.items()
                    ],
                )
                for update in batch.updates
            )
        try:
            reply = await self._stub.Exchange(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _away(error) from error
        return News(
            reply.epoch,
            reply.version,
            [(Cell(Group(*row.group.values), row.span, row.start), _row(row)) for row in reply.rows],
            dict(reply.documents),
        )

    async def put_document(self, name: str, expected: str, value: str, audit: Audit) -> tuple[bool, str]:
        """See ``Writer``."""
        request = ledger_pb2.PutDocumentRequest(
            name=name, expected=expected, value=value, subject=audit.subject, words=audit.words
        )
        try:
            reply = await self._stub.PutDocument(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _away(error) from error
        return reply.written, reply.value

    async def audits(self, limit: int) -> list[Audit]:
        """See ``Writer``."""
        try:
            reply = await self._stub.ListAudit(ledger_pb2.ListAuditRequest(limit=limit), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _away(error) from error
        return [Audit(r.at, r.kind, r.subject, r.words, {}) for r in reply.records]


def _group(group: Group) -> ledger_pb2.LedgerGroup:
    return ledger_pb2.LedgerGroup(values=group.values)


def _row(row: ledger_pb2.LedgerRow) -> Row:
    return np.array(row.sums, dtype=np.int64)


def _away(error: grpc.aio.AioRpcError) -> OSError | InvalidRequestError:
    """For those who go on without the ledger, whatever is the matter with it; what it refuses is no matter of it."""
    meant = error_from_rpc(error)
    return meant if isinstance(meant, InvalidRequestError) else OSError(str(meant))

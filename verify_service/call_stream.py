"""One ``DecodeMany`` stream: a router's sequences, whose news of a step go out as one message.

A stream of its own for each sequence takes a message a sequence a step, and a message costs more than all that is in it.
When the stream ends, for whatever reason, its sequences are given up.
"""

import asyncio
import logging
import math
from functools import partial
from typing import Any

import grpc

from paceline.errors import InvalidRequestError, PeerLostError
from paceline.serving.interceptors import told_status
from paceline.telemetry.context import TraceContext
from paceline.v1 import verify_pb2
from verify_service.calls import Call, Calls
from verify_service.sequence import Event

log = logging.getLogger(__name__)

_METHOD = "/paceline.v1.VerifyService/DecodeMany"
_MOST_EVENTS = 1024
"""In a message: where the caller was slow to read, what waits may be more than a message may hold."""
_DRAINING = "this verify replica is stopping"


class CallStream:
    """See the module. Lives on the event loop; ``run`` it once."""

    def __init__(self, calls: Calls) -> None:
        self._begin = calls.begin
        self._calls: dict[int, Call] = {}
        self._last_number = -1
        self._news: list[tuple[int, Event | bytes]] = []  # bytes: the status of a sequence that never began
        self._something = asyncio.Event()
        self._closing = False
        self._fault: BaseException | None = None

    async def run(self, context: Any) -> None:
        """Serve until the last sequence is over and no more may come. Raises InvalidRequestError for what is no start and no cancel."""
        reader = asyncio.create_task(self._read(context))
        reader.add_done_callback(self._heard_all)
        try:
            # What the caller did wrong ends the writer too, but never in the middle of a message: gRPC could not end the call then.
            await self._write(context)
            if self._fault is not None:
                raise self._fault
        finally:
            reader.cancel()
            for call in self._calls.values():
                _end(call)

    def drain(self) -> None:
        """Take no more sequences; the stream ends with its last one."""
        self._closing = True
        self._something.set()

    # --- in ---------------------------------------------------------------------------------------------------

    async def _read(self, context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            match request.WhichOneof("message"):
                case "start":
                    self._start(request.start)
                case "cancel":
                    self._cancel(request.cancel)
                case _:
                    raise InvalidRequestError.single("message", "is empty; expected a start or a cancel")

    def _heard_all(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            self._fault = reader.exception()
            self.drain()

    def _start(self, start: verify_pb2.DecodeStart) -> None:
        number = start.number
        if number <= self._last_number:
            raise InvalidRequestError.single(
                "start.number", f"{number}; expected one above {self._last_number}"
            )
        self._last_number = number
        caller = TraceContext.from_traceparent(start.traceparent)
        try:
            if self._closing:
                raise PeerLostError(_DRAINING)
            tell = partial(self._tell, number)
            self._calls[number] = self._begin(start.request, caller, _timeout_s(start), tell)
        except Exception as error:  # a fault of this sequence, or ours: the others on the stream go on
            self._tell(number, _status(error, caller))

    def _cancel(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            _end(call)
            self._something.set()  # it may have been the last one

    # --- out --------------------------------------------------------------------------------------------------

    def _tell(self, number: int, news: Event | bytes) -> None:
        self._news.append((number, news))
        self._something.set()

    async def _write(self, context: Any) -> None:
        while self._fault is None and (self._calls or self._news or not self._closing):
            await self._something.wait()
            self._something.clear()
            while self._news:
                batch, self._news = self._news[:_MOST_EVENTS], self._news[_MOST_EVENTS:]
                message = verify_pb2.DecodeManyResponse()
                for number, news in batch:
                    self._put(message, number, news)
                if message.events:
                    await context.write(message)

    def _put(self, message: verify_pb2.DecodeManyResponse, number: int, news: Event | bytes) -> None:
        if isinstance(news, bytes):
            message.events.add(number=number, status=news)
            return
        call = self._calls.get(number)
        if call is None:  # cancelled: nobody waits for what was on its way
            return
        try:
            message.events.add(number=number, response=call.response(news))
        except Exception as error:
            message.events.add(number=number, status=_status(error, call.caller))
            call.over = True
        if call.over:
            del self._calls[number]
            _end(call)


def _end(call: Call) -> None:
    try:
        call.end()
    except Exception:  # a fault of ours in the account of one sequence: the others on the stream go on
        log.exception("the end of a sequence failed")


def _status(error: Exception, caller: TraceContext | None) -> bytes:
    return bytes(told_status(error, _METHOD, caller).SerializeToString())


def _timeout_s(start: verify_pb2.DecodeStart) -> float | None:
    if not start.HasField("timeout_s"):
        return None
    if not math.isfinite(start.timeout_s) or start.timeout_s < 0:
        raise InvalidRequestError.single("timeout_s", f"{start.timeout_s}; expected seconds, 0 or more")
    return start.timeout_s

"""A router's sequences on one verify replica: all of them over one ``DecodeMany`` stream, opened when it is first needed.

To whoever decodes, a call looks like a stream of its own. When the stream breaks, all calls on it end with the same error, and the
next one opens another.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from functools import partial

import grpc

from paceline.errors import DeadlineError, PacelineError, PeerLostError
from paceline.serving.status import error_from_status, plain_words
from paceline.v1 import verify_pb2, verify_pb2_grpc

log = logging.getLogger(__name__)

_Outbox = asyncio.Queue[verify_pb2.DecodeManyRequest | None]

_HELD = 16
"""Responses that may wait as they came; of a call that is read more slowly than it is answered, copies wait."""


class DecodeCall:
    """One sequence. ``read`` it to its end, and ``cancel`` it whatever happens."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._news: asyncio.Queue[verify_pb2.DecodeResponse | PacelineError] = asyncio.Queue()
        self._cancel = cancel
        self._timer: asyncio.TimerHandle | None = None

    async def read(self) -> verify_pb2.DecodeResponse:
        """The next response. Raises the error that ended the sequence, or that lost the replica."""
        news = await self._news.get()
        if isinstance(news, PacelineError):
            raise news
        return news

    def cancel(self) -> None:
        """Nobody waits any more; does nothing once the call is over."""
        if self._timer is not None:
            self._timer.cancel()
        self._cancel()

    def put(self, news: verify_pb2.DecodeResponse | PacelineError) -> None:
        """For the stream only."""
        if self._news.qsize() >= _HELD and isinstance(news, verify_pb2.DecodeResponse):
            # A part of a message holds the whole of it, with what all others were told: 25 KB a token beside 63 of them.
            whole, news = news, verify_pb2.DecodeResponse()
            news.CopyFrom(whole)
        self._news.put_nowait(news)

    def end_in(self, timeout_s: float) -> None:
        """For the stream only: the caller's time is over then, whatever the replica does."""
        error = DeadlineError("the caller's deadline passed")
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.put, error)


class DecodeCalls:
    """All calls to one replica. Lives on the event loop."""

    def __init__(self, address: str, stub: "verify_pb2_grpc.VerifyServiceAsyncStub") -> None:
        self._address = address
        self._stub = stub
        self._calls: dict[int, DecodeCall] = {}
        self._outbox: _Outbox | None = None
        """Of the stream that is open."""
        self._reader: asyncio.Task[PacelineError] | None = None
        self._number = 0

    def call(
        self, request: verify_pb2.DecodeRequest, *, timeout_s: float | None, traceparent: str = ""
    ) -> DecodeCall:
        """Begin to decode. A replica that cannot be reached shows when the call is read."""
        if self._outbox is None:
            self._open()
        self._number += 1
        number = self._number
        call = self._calls[number] = DecodeCall(partial(self._cancel, number))
        if timeout_s is not None:
            call.end_in(max(timeout_s, 0.0))
        self._send(
            verify_pb2.DecodeManyRequest(
                start=verify_pb2.DecodeStart(
                    number=number,
                    request=request,
                    timeout_s=None if timeout_s is None else max(timeout_s, 0.0),
                    traceparent=traceparent,
                )
            )
        )
        return call

    async def close(self) -> None:
        """End the stream; calls that are left end with it."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    def _cancel(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self._send(verify_pb2.DecodeManyRequest(cancel=number))

    def _send(self, message: verify_pb2.DecodeManyRequest) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(message)

    def _open(self) -> None:
        outbox: _Outbox = asyncio.Queue()
        self._outbox = outbox
        self._reader = asyncio.create_task(
            self._read(outbox),
            name=f"decoding on {self._address}",
            context=Context(),  # it works for all requests: its log lines name no trace
        )
        self._reader.add_done_callback(partial(self._ended, outbox))

    async def _read(self, outbox: _Outbox) -> PacelineError:
        """Hand out what comes, until the stream ends; gives why it did."""
        stream = None
        try:
            stream = self._stub.DecodeMany(_drain(outbox))
            async for response in stream:
                for event in response.events:
                    self._put(event)
        except grpc.aio.AioRpcError as error:
            return self._meaning(error)
        except Exception:  # a fault of ours, or a message that is none
            log.exception("decoding stream failed", extra={"replica": self._address})
        finally:
            if stream is not None:
                stream.cancel()
        return self._lost("it ended the stream without an answer")

    def _ended(self, outbox: _Outbox, reader: asyncio.Task[PacelineError]) -> None:
        # Here, not in the task: one that is cancelled before its first step runs nothing of its own.
        outbox.put_nowait(None)
        # Whoever calls from now on opens another stream; numbers go on.
        self._outbox = None
        calls, self._calls = self._calls, {}
        failure = self._lost("this router closed the stream") if reader.cancelled() else reader.result()
        for call in calls.values():
            call.put(failure)

    def _put(self, event: verify_pb2.DecodeEvent) -> None:
        failed = event.HasField("status")
        news = error_from_status(event.status) if failed else event.response
        if isinstance(news, PeerLostError):
            news = self._lost(str(news))
        over = failed or event.response.HasField("finished")
        call = self._calls.pop(event.number, None) if over else self._calls.get(event.number)
        if call is not None:  # not cancelled meanwhile
            call.put(news)

    def _meaning(self, error: grpc.aio.AioRpcError) -> PeerLostError:
        """Statuses of sequences come in messages: one that ends the stream is the transport's, or of a replica that stops."""
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return self._lost(
                "it is older than this router and knows no DecodeMany; upgrade verify replicas first"
            )
        return self._lost(plain_words(error.code(), error.details() or ""))

    def _lost(self, words: str) -> PeerLostError:
        return PeerLostError(f"verify replica {self._address}: {words.removeprefix(f'{self._address}: ')}")


async def _drain(outbox: _Outbox) -> AsyncIterator[verify_pb2.DecodeManyRequest]:
    # Ends by a None: grpc.aio does not end the iterator of a call that is over.
    while (message := await outbox.get()) is not None:
        yield message

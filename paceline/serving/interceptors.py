"""The one place where exceptions become statuses, around every handler of a server.

- An error of ``paceline.errors`` becomes its rich status (``paceline.serving.status``), also out of a task group.
- A failed call to another tier that the handler let through is passed on as what it means.
- Request bytes that are no message answer INVALID_ARGUMENT naming the field. In a stream of requests the read that
  meets them raises InvalidRequestError: a handler that does not care ends with INVALID_ARGUMENT, one that does may
  catch it and read on.
- Anything else is our fault: INTERNAL with a short text for the client and one line with the traceback in the log.
- A cancelled call is normal: silent.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.rpc import status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from paceline.errors import EngineError, InvalidRequestError, PacelineError, PeerLostError
from paceline.serving.in_flight import InFlight
from paceline.serving.status import error_from_rpc, internal_status, status_from_error
from paceline.serving.wire import malformed_request
from paceline.telemetry.context import TraceContext, bind_trace, current_trace, extract

_logger = logging.getLogger(__name__)

_INFRASTRUCTURE = ("/grpc.health.", "/grpc.reflection.")
_CUT = "server is shutting down"
_CUT_RETRY_S = 0.5
_NEWS_S = 1.0

Behaviour = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands in for a request whose bytes could not be parsed, until a handler would read it."""

    error: InvalidRequestError


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps coroutine and async-generator handlers; plain functions are left alone (no tier has one)."""

    def __init__(self, in_flight: InFlight, background: InFlight) -> None:
        """``background`` holds the calls of health and reflection, for which no drain waits."""
        self._in_flight = in_flight
        self._background = background
        self._wrapped: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, wrapped once and remembered."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = (handler, self._wrap(handler, method))
        return known[1]

    def _wrap(self, handler: Any, method: str) -> Any:
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        behaviour = getattr(handler, kind)
        if inspect.isasyncgenfunction(behaviour):
            behaviour = _writing(behaviour)
        elif not inspect.iscoroutinefunction(behaviour):
            return handler
        in_flight = self._background if method.startswith(_INFRASTRUCTURE) else self._in_flight
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            _answering(behaviour, method, in_flight),
            _tolerant(handler.request_deserializer, method),
            handler.response_serializer,
        )


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"


# --- around a handler -------------------------------------------------------------------------------------------


def _writing(generator: Behaviour) -> Behaviour:
    """An async-generator handler as a coroutine that writes: closed in its own task, and cut like the others."""

    async def write_all(request: Any, context: Any) -> None:
        async with aclosing(generator(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all


def _answering(behaviour: Behaviour, method: str, in_flight: InFlight) -> Behaviour:
    """``behaviour``, in a task of its own: then a cancel of this one can only mean that the client is gone.

    (``Task.cancelling`` cannot tell: before Python 3.13 a task group that failed leaves it raised.)
    """

    async def handle(request: Any, context: Any) -> Any:
        return await behaviour(_checked(request), _CheckedContext(context))

    async def run(request: Any, context: Any) -> Any:
        scope = copy_context()
        scope.run(bind_trace, extract(context.invocation_metadata()))
        task = asyncio.create_task(handle(request, context), name=method, context=scope)
        with in_flight.call(task) as call:
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait({task})
                _ = task.cancelled() or task.exception()  # seen: nobody is left to be told
                raise
            if not task.cancelled() and task.exception() is None:
                return task.result()
            error = _outcome(task)
            if call.cut and not context.done():
                error = PeerLostError(_CUT, _CUT_RETRY_S)
            return await _answer(error, method, context, scope.run(current_trace))

    return run


def _outcome(task: asyncio.Task[Any]) -> BaseException:
    """What a task that did not succeed ended with."""
    if task.cancelled():
        return EngineError(
            "the request was given up"
        )  # somebody else's cancelled task, awaited by the handler
    error = task.exception()
    assert error is not None, "the task has failed"
    return error


async def _answer(error: BaseException, method: str, context: Any, trace: TraceContext | None) -> NoReturn:
    """End the call with the status for ``error``. Always raises: grpc.aio wants to see its own abort."""
    leaves = list(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, grpc.aio.AbortError):
            raise leaf  # the handler has answered itself, maybe inside a task group
    if any(isinstance(leaf, grpc.aio.InternalError) for leaf in leaves):
        # An operation on a dead call: its client is gone, and the news of it is on its way to this task.
        await asyncio.sleep(_NEWS_S)
        raise error
    await context.abort_with_status(rpc_status.to_status(told_status(_cause(leaves), method, trace)))
    raise AssertionError("abort raises")


def told_status(cause: BaseException, method: str, trace: TraceContext | None = None) -> status_pb2.Status:
    """The status that a caller is told; a line in the log where the fault is ours."""
    if isinstance(cause, EngineError) or not isinstance(cause, PacelineError):
        fields = {"method": method, "error": type(cause).__name__}
        if trace is not None:
            fields["trace_id"] = trace.trace_id_hex
        _logger.error("request failed", exc_info=cause, extra=fields)
    if isinstance(cause, PacelineError):
        return status_from_error(cause)
    return internal_status("internal error" + (f", trace {trace.trace_id_hex}" if trace else ""))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that a task group put together, in order; ``error`` itself when it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _cause(leaves: list[BaseException]) -> BaseException:
    """The exception to tell the client about: one raised on purpose, else the first."""
    meant = [error_from_rpc(leaf) if isinstance(leaf, grpc.aio.AioRpcError) else leaf for leaf in leaves]
    return next((leaf for leaf in meant if isinstance(leaf, PacelineError)), meant[0])


# --- requests that are no message ---------------------------------------------------------------------------------


def _tolerant(deserializer: Callable[[bytes], Any] | None, method: str) -> Callable[[bytes], Any] | None:
    """``deserializer``, giving Malformed where it would raise: raising there would answer UNKNOWN and log a page."""
    if deserializer is None:
        return None
    descriptor = _input_type(method)

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            if descriptor is None:
                return Malformed(InvalidRequestError.single("request", str(error)))
            return Malformed(malformed_request(data, descriptor))

    return deserialize


def _input_type(method: str) -> Descriptor | None:
    try:
        found = descriptor_pool.Default().FindMethodByName(method.removeprefix("/").replace("/", "."))
    except KeyError:
        return None
    return found.input_type


def _checked(request: Any) -> Any:
    """The request, or the stream of requests, that a handler may see. Raises InvalidRequestError."""
    if isinstance(request, Malformed):
        raise request.error
    return _CheckedRequests(request) if hasattr(request, "__anext__") else request


class _CheckedRequests:
    """A stream of requests whose read raises for a malformed one, and can be read on afterwards."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests

    def __aiter__(self) -> "_CheckedRequests":
        return self

    async def __anext__(self) -> Any:
        return _checked(await self._requests.__anext__())


class _CheckedContext:
    """A servicer context whose ``read`` raises for a malformed request; all else is the context's own."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> Any:
        return _checked(await self._context.read())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

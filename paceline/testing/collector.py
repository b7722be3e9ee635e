"""An OTLP collector for tests: the real trace service over a real socket, remembering what it is sent."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypedDict

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2


class SeenSpan(TypedDict):
    """A span as it came over the wire. Ids are hexadecimal, times Unix seconds."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty for a root
    start: float
    end: float
    attributes: dict[str, Any]
    kind: str  # internal, server or client
    error: str | None


class OtlpCollector:
    """``async with OtlpCollector() as collector:``, then give ``collector.endpoint`` to the tiers.

    It runs on threads of its own, not on the event loop: a service that sends its last spans while it holds the loop
    (a blocking shutdown) still gets an answer.
    """

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self._host = host
        self._port = port
        self._lock = threading.Lock()
        self._spans: list[SeenSpan] = []
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._server: grpc.Server | None = None
        self.endpoint = ""

    @property
    def spans(self) -> list[SeenSpan]:
        """All spans so far, in order of arrival."""
        with self._lock:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[SeenSpan]:
        """The spans of one trace, by start."""
        return sorted((s for s in self.spans if s["trace_id"] == trace_id), key=lambda s: s["start"])

    def children(self, span: SeenSpan) -> list[SeenSpan]:
        """The spans right below ``span``, by start."""
        return [s for s in self.trace(span["trace_id"]) if s["parent_id"] == span["span_id"]]

    async def wait_for(
        self, predicate: Callable[[list[SeenSpan]], bool], *, timeout_s: float = 10.0
    ) -> list[SeenSpan]:
        """Wait until ``predicate`` holds for the spans so far, and give them. Raises AssertionError after a while."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        waiter = (loop, arrived)
        with self._lock:
            self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate(spans := self.spans):
                    await arrived.wait()
                    arrived.clear()
                return spans
        except TimeoutError:
            seen = ", ".join(f"{s['service']}/{s['name']}" for s in self.spans)
            raise AssertionError(f"not within {timeout_s} s; spans so far: {seen or 'none'}") from None
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Take what a service sent; called on the server's threads."""
        seen = [span for group in request.resource_spans for span in _flatten(group)]
        with self._lock:
            self._spans += seen
            for loop, arrived in self._waiters:
                loop.call_soon_threadsafe(arrived.set)

    async def __aenter__(self) -> Self:
        server = grpc.server(
            ThreadPoolExecutor(max_workers=4, thread_name_prefix="otlp-collector"),
            options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 * 2**20)),
        )
        add_TraceServiceServicer_to_server(_TraceService(self), server)  # type: ignore[no-untyped-call]
        self._port = server.add_insecure_port(f"{self._host}:{self._port}")
        server.start()
        self._server = server
        self.endpoint = f"http://{self._host}:{self._port}"
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            stopped = self._server.stop(grace=None)
            await asyncio.to_thread(stopped.wait)


class _TraceService(TraceServiceServicer):
    def __init__(self, collector: OtlpCollector) -> None:
        self._collector = collector

    def Export(  # noqa: N802 - the service's own name
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self._collector.add(request)
        return ExportTraceServiceResponse()


_KINDS = {
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
}


def _flatten(group: trace_pb2.ResourceSpans) -> list[SeenSpan]:
    resource = _attributes(group.resource.attributes)
    return [
        SeenSpan(
            service=resource.get("service.name", ""),
            instance=resource.get("service.instance.id", ""),
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start=span.start_time_unix_nano / 1e9,
            end=span.end_time_unix_nano / 1e9,
            attributes=_attributes(span.attributes),
            kind=_KINDS.get(span.kind, "unspecified"),
            error=span.status.message if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR else None,
        )
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    match value.WhichOneof("value"):
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case None:
            return None
        case name:
            return getattr(value, name)

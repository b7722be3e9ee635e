"""Spans to an OTLP collector over gRPC, without ever being in the way.

OpenTelemetry's own exporter retries each batch for seconds, logs every failure and can hold a shutdown for the length
of its queue times its timeout. A missing collector must cost a request nothing and an operator one line, so this one
tries a batch once and, while the collector is away, drops spans at once and asks again only every few seconds.

The SDK's value type is filled in directly: a ``ReadableSpan`` made from known ids and times costs 3 microseconds here,
the same span through a tracer with a preset id generator 23 (12 attributes, one core).
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace import SpanKind as SdkSpanKind
from opentelemetry.util.re import parse_env_headers

from paceline import __version__
from paceline.errors import ConfigError
from paceline.telemetry.context import TraceContext
from paceline.telemetry.spans import AttributeValue, SpanKind
from paceline.telemetry.wire import encode

_logger = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 1.5
CLOSE_S = 2.0
AWAY_S = 5.0

_DEFAULT_PORT = 4317
_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

# A burst of 32 traced requests that end together is about 16,000 spans of a kilobyte or two each.
_QUEUE_SPANS = 16384
_BATCH_SPANS = 512
_SEND_EVERY_MS = 500.0

_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 5000))
_SCOPE = InstrumentationScope("paceline", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
_KINDS: dict[SpanKind, SdkSpanKind] = {
    "internal": SdkSpanKind.INTERNAL,
    "server": SdkSpanKind.SERVER,
    "client": SdkSpanKind.CLIENT,
}


class OtlpSink:
    """A queue of spans and the thread that sends them."""

    def __init__(self, endpoint: str, *, service_name: str, instance_id: str) -> None:
        self._exporter = OtlpSpanExporter(endpoint)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=_QUEUE_SPANS,
            schedule_delay_millis=_SEND_EVERY_MS,
            max_export_batch_size=_BATCH_SPANS,
        )
        self._resource = Resource.create({"service.name": service_name, "service.instance.id": instance_id})

    def add(
        self,
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, AttributeValue],
        error: str | None,
        kind: SpanKind,
    ) -> None:
        """Queue one span; the oldest makes room when the queue is full."""
        self._processor.on_end(
            ReadableSpan(
                name,
                context=SpanContext(context.trace_id, context.span_id, is_remote=False, trace_flags=_SAMPLED),
                parent=None
                if parent is None
                else SpanContext(parent.trace_id, parent.span_id, is_remote=False, trace_flags=_SAMPLED),
                resource=self._resource,
                attributes=attributes,
                kind=_KINDS[kind],
                status=_UNSET if error is None else Status(StatusCode.ERROR, error),
                start_time=start_ns,
                end_time=end_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    @property
    def num_lost(self) -> int:
        """Spans that no collector took."""
        return self._exporter.num_lost

    def close(self) -> None:
        """Send what is left, but give up after CLOSE_S."""
        self._exporter.give_up_after(CLOSE_S)
        self._processor.shutdown()  # type: ignore[no-untyped-call]


class OtlpSpanExporter(SpanExporter):
    """Sends batches to ``endpoint`` (``http://host:port``, ``https://host:port`` or ``host:port``).

    ``export`` runs on the batch processor's thread; ``num_lost`` counts spans that no collector took.
    """

    def __init__(self, endpoint: str) -> None:
        target, secure = parse_endpoint(endpoint)
        self._endpoint = endpoint
        self._channel = (
            grpc.secure_channel(target, grpc.ssl_channel_credentials(), options=_OPTIONS)
            if secure
            else grpc.insecure_channel(target, options=_OPTIONS)
        )
        self._send: Any = self._channel.unary_unary(
            _METHOD, response_deserializer=ExportTraceServiceResponse.FromString
        )
        headers = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or os.environ.get(
            "OTEL_EXPORTER_OTLP_HEADERS", ""
        )
        self._metadata = tuple(parse_env_headers(headers, liberal=True).items())
        self._away_until = 0.0
        self._warned = False
        self._closes_at = float("inf")
        self.num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """One attempt; spans are dropped, and counted, while the collector is away."""
        now = time.monotonic()
        timeout_s = min(EXPORT_TIMEOUT_S, self._closes_at - now)
        if now < self._away_until or timeout_s <= 0:
            self.num_lost += len(spans)
            return SpanExportResult.FAILURE
        try:
            reply = self._send(encode(spans), timeout=timeout_s, metadata=self._metadata)
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed under us
            self._away_until = time.monotonic() + AWAY_S
            self.num_lost += len(spans)
            self._warn(error)
            return SpanExportResult.FAILURE
        self._warned = False
        self.num_lost += reply.partial_success.rejected_spans
        return SpanExportResult.SUCCESS

    def _warn(self, error: Exception) -> None:
        """Once for each time the collector goes away."""
        if self._warned:
            return
        self._warned = True
        code = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
        _logger.warning(
            "trace collector does not answer, spans are dropped until it does",
            extra={"endpoint": self._endpoint, "code": code},
        )

    def give_up_after(self, limit_s: float) -> None:
        """From now on, calls have so long in all."""
        self._closes_at = time.monotonic() + limit_s

    def shutdown(self) -> None:
        """Close the channel; a call in flight ends at once."""
        self._channel.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is buffered here."""
        return True


def parse_endpoint(endpoint: str) -> tuple[str, bool]:
    """Target and whether it wants TLS; the port is 4317 where none is given. Raises ConfigError for anything else."""
    parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    try:
        target = parts.netloc if parts.port is not None else f"{parts.netloc}:{_DEFAULT_PORT}"
    except ValueError:
        target = ""
    if (
        parts.scheme not in {"http", "https"}
        or not parts.hostname
        or not target
        or parts.path not in {"", "/"}
    ):
        raise ConfigError(f"trace endpoint {endpoint!r}: expected http://host:port of an OTLP gRPC collector")
    return target, parts.scheme == "https"

"""Spans as values: ids are allocated beforehand, the span is recorded when its times are known.

Nothing global is touched: the tests run three tiers in one process, and each keeps its own service name.
"""

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Self

from paceline.config import TelemetryConfig
from paceline.telemetry.context import TraceContext

if TYPE_CHECKING:
    from paceline.telemetry.export import OtlpSink

__all__ = ["MAX_ROUND_SPANS", "AttributeValue", "SpanKind", "Telemetry", "round_context"]

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
SpanKind = Literal["internal", "server", "client"]

MAX_ROUND_SPANS = 160
"""Rounds of a request that get spans (round, verify, draft: under 500 a trace); the others are only counted."""


class Telemetry:
    """One service's spans. Without an endpoint nothing is made: ``enabled`` is False and ``record`` returns at once.

    ``record`` may be called from any thread; a span costs a few microseconds there and is sent by another thread.
    """

    def __init__(self, sink: "OtlpSink | None" = None, *, sample_ratio: float = 0.0) -> None:
        """Use ``setup``; this is the part behind it."""
        self._sink = sink
        self._sample_below = round(sample_ratio * 2**64)
        # Spans carry wall time, measurements are monotonic: one offset for the life of the process.
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()
        self._closed = False

    @classmethod
    def setup(cls, config: TelemetryConfig, *, service_name: str, instance_id: str) -> Self:
        """Spans of ``service_name``, sent to the configured endpoint or the environment's. Raises ConfigError."""
        endpoint = (
            config.otlp_endpoint
            or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
            or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
        )
        if not endpoint:
            return cls()
        # The SDK takes a tenth of a second to import: only those pay who trace.
        from paceline.telemetry.export import OtlpSink

        sink = OtlpSink(endpoint, service_name=service_name, instance_id=instance_id)
        return cls(sink, sample_ratio=config.sample_ratio)

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return self._sink is not None

    @property
    def num_lost(self) -> int:
        """Spans that no collector took."""
        return self._sink.num_lost if self._sink is not None else 0

    def new_trace(self, parent: TraceContext | None) -> TraceContext | None:
        """Id of a request's first span; None when the request is not traced.

        For the front door only: tiers behind it trace iff their caller handed them a sampled context. A caller's
        decision is honoured, either way; requests without one are sampled by the configured ratio.
        """
        if self._sink is None:
            return None
        if parent is not None:
            return self.child(parent) if parent.sampled else None
        trace_id = _fresh_id(128)
        if trace_id & (2**64 - 1) >= self._sample_below:
            return None
        return TraceContext(trace_id, _fresh_id(64), sampled=True)

    def child(self, parent: TraceContext) -> TraceContext:
        """A fresh span id in the same trace."""
        return TraceContext(parent.trace_id, _fresh_id(64), parent.sampled)

    def record(
        self,
        name: str,
        context: TraceContext,
        *,
        parent: TraceContext | None,
        start: float,
        end: float,
        attributes: Mapping[str, AttributeValue] | None = None,
        error: str | None = None,
        kind: SpanKind = "internal",
    ) -> None:
        """The span ``context`` ran from ``start`` to ``end`` (``time.monotonic()`` seconds); ``error``: it failed so.

        Nothing happens when the context is not sampled or no exporter is set up. ``attributes`` is not copied: hand
        over a mapping that nobody changes afterwards.
        """
        if self._sink is None or not context.sampled or self._closed:
            return
        start_ns = self._wall_ns(start)
        end_ns = max(start_ns, self._wall_ns(end))
        self._sink.add(name, context, parent, start_ns, end_ns, attributes or {}, error, kind)

    def _wall_ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._wall_offset_ns

    def shutdown(self) -> None:
        """Send what is left and stop, within about two seconds whatever the collector does. Blocks; idempotent.

        Spans recorded later are dropped.
        """
        if self._sink is not None and not self._closed:
            self._closed = True
            self._sink.close()


def round_context(decode: TraceContext, index: int) -> TraceContext:
    """Id of the span of round ``index``, derived from the verify tier's decode span.

    Verify and draft compute the same id without asking each other, so the draft tier can record a child of a span
    that the verify tier makes later.
    """
    text = decode.trace_id.to_bytes(16, "big") + decode.span_id.to_bytes(8, "big") + index.to_bytes(8, "big")
    span_id = int.from_bytes(blake2b(text, digest_size=8, key=b"paceline round").digest(), "big")
    return TraceContext(decode.trace_id, span_id or 1, decode.sampled)


def _fresh_id(bits: int) -> int:
    """Random, never 0. From the system, so that seeding a generator in a test cannot make two traces one."""
    return secrets.randbits(bits) or 1

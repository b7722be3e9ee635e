"""W3C trace context over gRPC metadata: which trace a call belongs to (https://www.w3.org/TR/trace-context/).

Only ``traceparent`` travels; ``tracestate`` is vendor baggage that nothing here reads.
"""

import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

_KEY = "traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span's identity: ``trace_id`` of 128 bits, ``span_id`` of 64, neither ever 0."""

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def from_traceparent(cls, text: str) -> Self | None:
        """The context that ``text`` names; None where it is no valid traceparent."""
        match = _FORM.fullmatch(text)
        if match is None:
            return None
        version, trace_id, span_id, flags, rest = match.groups()
        # Version 00 ends after the flags; a later one may go on, ff is forbidden.
        if version == "ff" or (version == "00" and rest is not None):
            return None
        context = cls(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
        return context if context.trace_id and context.span_id else None

    def to_traceparent(self) -> str:
        """``00-<trace id>-<span id>-<flags>``."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.sampled else 0:02x}"

    @property
    def trace_id_hex(self) -> str:
        """32 hexadecimal digits, as shown to people."""
        return f"{self.trace_id:032x}"


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> TraceContext | None:
    """The caller's context from a call's metadata; None without one, with a broken one or with two that differ."""
    found = {value for key, value in metadata or () if key == _KEY}
    if len(found) != 1:
        return None
    value = found.pop()
    return TraceContext.from_traceparent(value) if isinstance(value, str) else None


# What log lines of the current task should name. Tasks inherit it from the task that made them.
_current: ContextVar[TraceContext | None] = ContextVar("paceline_trace", default=None)


def current_trace() -> TraceContext | None:
    """The trace that the current task works for; the log formatter and the error interceptor read it."""
    return _current.get()


def bind_trace(context: TraceContext | None) -> None:
    """Name ``context`` in the log lines of the current task from now on, and of tasks that it starts.

    The server binds the caller's context before a handler runs; a handler that starts a trace binds its own.
    """
    _current.set(context)

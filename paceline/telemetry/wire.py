"""Spans as bytes of an OTLP request, written by hand.

The SDK's encoder builds a message object for each attribute: 50 microseconds for a round's span with its twenty attributes,
on cores that the engine wants. Here keys and short values are encoded once and kept; the bytes are the ones that the SDK's
messages would serialise to, and a test compares the two (protobuf wire format; opentelemetry/proto/trace/v1/trace.proto).
"""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind

_DOUBLE = struct.Struct("<d")
_FIXED64 = struct.Struct("<Q")
_KINDS = {
    SpanKind.INTERNAL: 1,
    SpanKind.SERVER: 2,
    SpanKind.CLIENT: 3,
    SpanKind.PRODUCER: 4,
    SpanKind.CONSUMER: 5,
}
_FLAGS = b"\x85\x01\x00\x01\x00\x00"  # field 16, fixed32: the parent's being remote is known, and it is not
_LONGEST_KEPT = 64
"""Longer texts are seldom the same twice."""


def encode(spans: Sequence[ReadableSpan]) -> bytes:
    """An ExportTraceServiceRequest of spans that share one resource and one scope."""
    if not spans:
        return b""
    first = spans[0]
    assert first.instrumentation_scope is not None, "every span of ours has one"
    body = [_scope(first.instrumentation_scope), *(_field(2, _span(span)) for span in spans)]
    return _field(1, _resource(first.resource) + _field(2, b"".join(body)))


def _span(span: ReadableSpan) -> bytes:
    context = span.get_span_context()
    assert context is not None, "a finished span has one"
    parts = [
        b"\x0a\x10", context.trace_id.to_bytes(16, "big"),
        b"\x12\x08", context.span_id.to_bytes(8, "big"),
    ]  # fmt: skip
    if span.parent is not None:
        parts += [b"\x22\x08", span.parent.span_id.to_bytes(8, "big")]
    parts += [
        _text(5, span.name),
        b"\x30" + bytes((_KINDS[span.kind],)),
        b"\x39", _FIXED64.pack(span.start_time or 0),
        b"\x41", _FIXED64.pack(span.end_time or 0),
        _attributes(9, span.attributes or {}),
        _status(span.status.status_code.value, span.status.description or ""),
        _FLAGS,
    ]  # fmt: skip
    return b"".join(parts)


def _attributes(number: int, attributes: Mapping[str, Any]) -> bytes:
    """Texts, numbers, truth values and lists of those: what ``Telemetry.record`` takes."""
    parts = []
    for key, value in attributes.items():
        if isinstance(value, float):
            parts += [_before_double(number, key), _DOUBLE.pack(value)]
        elif isinstance(value, bool):
            parts.append(_kept(number, key, value, 0))
        elif isinstance(value, int):
            parts.append(_kept(number, key, value, 1) if -1 < value < 4096 else _pair(number, key, value))
        elif isinstance(value, str) and len(value) <= _LONGEST_KEPT:
            parts.append(_kept(number, key, value, 2))
        else:
            parts.append(_pair(number, key, value))
    return b"".join(parts)


@lru_cache(maxsize=256)
def _before_double(number: int, key: str) -> bytes:
    """All of a key and a number of it but the eight bytes of the number."""
    whole = _pair(number, key, 1.0)
    return whole[:-8]


@lru_cache(maxsize=16384)
def _kept(number: int, key: str, value: bool | int | str, kind: int) -> bytes:
    """``kind`` keeps True and 1 apart, which are equal as keys of a cache."""
    return _pair(number, key, value)


def _pair(number: int, key: str, value: Any) -> bytes:
    return _field(number, _text(1, key) + _field(2, _any(value)))


def _any(value: Any) -> bytes:
    match value:
        case str():
            return _field(1, value.encode())
        case bool():
            return b"\x10" + (b"\x01" if value else b"\x00")
        case int():
            return b"\x18" + _varint(value)
        case float():
            return b"\x21" + _DOUBLE.pack(value)
    return _field(5, b"".join(_field(1, _any(one)) for one in value))


@lru_cache(maxsize=8)
def _resource(resource: Resource) -> bytes:
    return _field(1, _attributes(1, resource.attributes))


@lru_cache(maxsize=8)
def _scope(scope: InstrumentationScope) -> bytes:
    return _field(1, _text(1, scope.name) + (_text(2, scope.version) if scope.version else b""))


@lru_cache(maxsize=256)
def _status(code: int, words: str) -> bytes:
    return _field(15, (_text(2, words) if words else b"") + (b"\x18" + _varint(code) if code else b""))


@lru_cache(maxsize=1024)
def _text(number: int, text: str) -> bytes:
    return _field(number, text.encode())


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes, a text or a message."""
    size = len(content)
    length = bytes((size,)) if size < 128 else _varint(size)
    return _varint(number << 3 | 2) + length + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; a negative number as its 64 bits."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)

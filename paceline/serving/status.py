"""``paceline.errors`` as ``google.rpc.Status`` and back: one table, used by servers and clients.

| error                 | code                | details besides ErrorInfo |
|-----------------------|---------------------|---------------------------|
| InvalidRequestError   | INVALID_ARGUMENT    | BadRequest                |
| ConfigError           | FAILED_PRECONDITION |                           |
| IncompatiblePeerError | FAILED_PRECONDITION |                           |
| CapacityError         | RESOURCE_EXHAUSTED  | RetryInfo                 |
| PeerLostError         | UNAVAILABLE         | RetryInfo                 |
| DeadlineError         | DEADLINE_EXCEEDED   |                           |
| EngineError           | INTERNAL            |                           |

``ErrorInfo.reason`` tells the two FAILED_PRECONDITION apart. A status travels in the trailing metadata, of which
clients take 8 KiB by default (message percent-encoded, details in base64), so long texts and lists are cut to fit.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

from paceline.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    EngineError,
    FieldViolation,
    IncompatiblePeerError,
    InvalidRequestError,
    PacelineError,
    PeerLostError,
)

DOMAIN = "paceline"
DETAILS_KEY = "grpc-status-details-bin"

# 3 * 500 + 4/3 * (500 + 3800 + 300) < 8000
_MAX_MESSAGE_BYTES = 500
_MAX_VIOLATIONS_BYTES = 3800
_MAX_FIELD_BYTES = 100
_MAX_DESCRIPTION_BYTES = 400
_RETRY_AFTER_S = 1.0  # where a peer asks for a retry without saying when
_MAX_RETRY_AFTER_S = 86_400.0  # a peer may say any number of seconds, more than a date can hold among them


@dataclass(frozen=True, slots=True)
class _Row:
    error: type[PacelineError]
    code: int
    reason: str


_TABLE = (
    _Row(InvalidRequestError, code_pb2.INVALID_ARGUMENT, "INVALID_REQUEST"),
    _Row(ConfigError, code_pb2.FAILED_PRECONDITION, "CONFIG"),
    _Row(IncompatiblePeerError, code_pb2.FAILED_PRECONDITION, "INCOMPATIBLE_PEER"),
    _Row(CapacityError, code_pb2.RESOURCE_EXHAUSTED, "CAPACITY"),
    _Row(PeerLostError, code_pb2.UNAVAILABLE, "PEER_LOST"),
    _Row(DeadlineError, code_pb2.DEADLINE_EXCEEDED, "DEADLINE"),
    _Row(EngineError, code_pb2.INTERNAL, "ENGINE"),
)

# Statuses that carry no detail of ours (from gRPC itself, a proxy, another program), by who is to blame.
_PEER_IS_GONE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
}
_PEER_IS_ANOTHER = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION}
_CALLER_IS_WRONG = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}


def status_from_error(error: PacelineError) -> status_pb2.Status:
    """The status that tells a client about ``error``."""
    row = next((row for row in _TABLE if isinstance(error, row.error)), _TABLE[-1])
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=row.reason, domain=DOMAIN)]
    if isinstance(error, InvalidRequestError):
        details.append(_bad_request(error.violations))
    elif isinstance(error, CapacityError | PeerLostError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=max(0.0, error.retry_after_s)))
        details.append(retry)
    return _status(row.code, str(error), details)


def internal_status(message: str) -> status_pb2.Status:
    """The status for a fault of ours that nobody foresaw; ``message`` must say nothing about the inside."""
    return _status(code_pb2.INTERNAL, message, [])


def _status(code: int, message: str, details: list[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=_clip(message, _MAX_MESSAGE_BYTES))
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _bad_request(violations: tuple[FieldViolation, ...]) -> error_details_pb2.BadRequest:
    bad, num_bytes = error_details_pb2.BadRequest(), 0
    for index, violation in enumerate(violations):
        field = _clip(violation.field, _MAX_FIELD_BYTES)
        description = _clip(violation.description, _MAX_DESCRIPTION_BYTES)
        num_bytes += len(field.encode()) + len(description.encode()) + 8
        if num_bytes > _MAX_VIOLATIONS_BYTES:
            left_out = f"{len(violations) - index} more violations are not listed"
            bad.field_violations.add(field="request", description=left_out)
            break
        bad.field_violations.add(field=field, description=description)
    return bad


def _clip(text: str, max_bytes: int) -> str:
    """At most so many bytes of UTF-8, without lone surrogates."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - 3].decode("utf-8", "ignore") + "…"


def error_from_rpc(error: grpc.aio.AioRpcError) -> PacelineError:
    """What a failed call means, in our own terms; details that a Paceline server sent are restored.

    Anything else is sorted by its status code: a peer that is gone or silent is a PeerLostError, one that speaks
    another protocol an IncompatiblePeerError, a refusal the caller's fault, the rest an EngineError.
    """
    return _meant(error.code(), error.details() or "", _details(error.trailing_metadata()))


def error_from_status(serialized: bytes) -> PacelineError:
    """The same of a google.rpc.Status that came in a message."""
    try:
        status = status_pb2.Status.FromString(serialized)
        code = _CODES[status.code]
    except (DecodeError, KeyError):
        return EngineError("the peer sent a status that is none")
    return _meant(code, status.message, _unpacked(status))


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _meant(code: grpc.StatusCode, message: str, details: Iterator[Message]) -> PacelineError:
    known: dict[str, Message] = {type(detail).__name__: detail for detail in details}
    info, bad, retry = known.get("ErrorInfo"), known.get("BadRequest"), known.get("RetryInfo")
    reason = info.reason if isinstance(info, error_details_pb2.ErrorInfo) and info.domain == DOMAIN else ""
    retry_after_s = _RETRY_AFTER_S
    if isinstance(retry, error_details_pb2.RetryInfo):
        retry_after_s = min(
            max(0.0, retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9), _MAX_RETRY_AFTER_S
        )

    if code in _CALLER_IS_WRONG or "message larger than max" in message:
        if isinstance(bad, error_details_pb2.BadRequest) and bad.field_violations:
            return InvalidRequestError([FieldViolation(v.field, v.description) for v in bad.field_violations])
        return InvalidRequestError.single("request", message or code.name)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CapacityError(message or code.name, retry_after_s)
    if reason == "DEADLINE":
        return DeadlineError(message or code.name)
    if code in _PEER_IS_GONE:
        return PeerLostError(message if reason else plain_words(code, message), retry_after_s)
    if code in _PEER_IS_ANOTHER:
        blame = ConfigError if reason == "CONFIG" else IncompatiblePeerError
        return blame(message or code.name)
    return EngineError(message or code.name)


_UNREACHABLE = {
    "Connection refused": "nobody listens there",
    "No route to host": "there is no way to that machine",
    "Network is unreachable": "there is no way to that machine",
    "DNS resolution failed": "no machine has that name",
    "Name or service not known": "no machine has that name",
    "connect failed": "it cannot be reached",
}
_BROKEN = (
    "Socket closed",
    "Connection reset",
    "Broken pipe",
    "recvmsg",
    "GOAWAY",
    "ping timeout",
    "keepalive",
)


def plain_words(code: grpc.StatusCode, message: str) -> str:
    """What gRPC says of a peer that is gone, for a person: the address where it is told, then what is the matter."""
    for theirs, ours in _UNREACHABLE.items():
        if theirs in message:
            found = re.search(r"ipv[46]:(?:%5B)?(\[?[\w.:]+\]?:\d+)", message)
            return f"{found[1]}: {ours}" if found else ours
    if any(sign in message for sign in _BROKEN):
        return "the connection broke: the other side has ended or does not answer"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return message or code.name


_DETAIL_TYPES = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)


def _details(metadata: grpc.aio.Metadata | None) -> Iterator[Message]:
    """The details that a server sent, those that are known and well-formed."""
    for key, value in metadata or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            return
        yield from _unpacked(status)


def _unpacked(status: status_pb2.Status) -> Iterator[Message]:
    for packed in status.details:
        for detail_type in _DETAIL_TYPES:
            detail = detail_type()
            try:
                if packed.Unpack(detail):
                    yield detail
            except DecodeError:
                continue

"""Statuses of other programs are sorted by blame; our own are restored."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    EngineError,
    FieldViolation,
    IncompatiblePeerError,
    InvalidRequestError,
    PeerLostError,
)
from paceline.serving.status import DETAILS_KEY, error_from_rpc, error_from_status, status_from_error

CODES = {code.value[0]: code for code in grpc.StatusCode}


def rpc_error(code, details="", metadata=()):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


def over_the_wire(error):
    status = status_from_error(error)
    return rpc_error(CODES[status.code], status.message, [(DETAILS_KEY, status.SerializeToString())])


FOREIGN = [
    (grpc.StatusCode.UNAVAILABLE, "connection refused", PeerLostError),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "", PeerLostError),
    (grpc.StatusCode.CANCELLED, "", PeerLostError),
    (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", IncompatiblePeerError),
    (grpc.StatusCode.FAILED_PRECONDITION, "", IncompatiblePeerError),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate limit", CapacityError),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 8)", InvalidRequestError),
    (grpc.StatusCode.INVALID_ARGUMENT, "bad", InvalidRequestError),
    (grpc.StatusCode.UNKNOWN, "", EngineError),
    (grpc.StatusCode.INTERNAL, "", EngineError),
]


@pytest.mark.parametrize(("code", "details", "error"), FOREIGN)
def test_a_status_without_our_details_is_sorted_by_its_code(code, details, error):
    """gRPC itself, proxies and other programs send such; the message is never empty."""
    restored = error_from_rpc(rpc_error(code, details))
    assert type(restored) is error
    assert str(restored)


def test_every_status_code_means_some_error():
    """No code is left without a meaning."""
    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK:
            assert str(error_from_rpc(rpc_error(code)))


def test_details_that_are_garbage_are_ignored():
    """A broken details trailer, or broken details within, costs only the details."""
    garbage = status_pb2.Status(code=3, message="bad")
    packed = garbage.details.add()
    packed.Pack(error_details_pb2.BadRequest(field_violations=[{"field": "f", "description": "d"}]))
    packed.value = b"\xff\xff"
    for trailer in (b"\xff\xff\xff", garbage.SerializeToString()):
        restored = error_from_rpc(
            rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "bad", [(DETAILS_KEY, trailer)])
        )
        assert restored.violations == (FieldViolation("request", "bad"),)


def test_which_precondition_failed_is_restored():
    """Two errors share FAILED_PRECONDITION and stay apart; a foreign domain does not count."""
    assert type(error_from_rpc(over_the_wire(ConfigError("x")))) is ConfigError
    assert type(error_from_rpc(over_the_wire(IncompatiblePeerError("x")))) is IncompatiblePeerError


def test_the_callers_own_deadline_is_told_from_a_silent_peer():
    """Both are DEADLINE_EXCEEDED: one that a Paceline server answered is not worth another try."""
    restored = error_from_rpc(over_the_wire(DeadlineError("too late")))
    assert type(restored) is DeadlineError
    assert str(restored) == "too late"


@given(
    st.lists(
        st.builds(FieldViolation, st.text(max_size=300), st.text(max_size=4000)), min_size=1, max_size=600
    )
)
@example([FieldViolation("é" * 300, "é" * 300)] * 400)
@example([FieldViolation("", "")] * 2000)
@example([FieldViolation("%" * 100, "%" * 100)] * 50)
def test_a_status_always_fits_into_a_trailer(violations):
    """Whatever was wrong, message and details as encoded stay below the 8 KiB that clients take."""
    status = status_from_error(InvalidRequestError(violations))
    assert 3 * len(status.message.encode()) + 4 / 3 * len(status.SerializeToString()) < 8000
    trailer = [(DETAILS_KEY, status.SerializeToString())]
    restored = error_from_rpc(rpc_error(CODES[status.code], status.message, trailer)).violations
    if len(restored) <= len(violations) and "not listed" in restored[-1].description:
        assert restored[-1].description.startswith(f"{len(violations) - len(restored) + 1} more")
    else:
        assert len(restored) == len(violations)


@given(st.floats(0, 3600))
def test_the_time_to_retry_survives(retry_after_s):
    """To the microsecond."""
    restored = error_from_rpc(over_the_wire(CapacityError("full", retry_after_s)))
    assert restored.retry_after_s == pytest.approx(retry_after_s, abs=1e-6)


@pytest.mark.parametrize("seconds", [2**63 - 1, 2**40, -5, -(2**63)])
def test_a_time_to_retry_that_is_none_is_taken_for_one(seconds):
    """A delay that no date can hold, or one in the past, must not raise where the answer is read."""
    status = status_from_error(CapacityError("full", 1.0))
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds = seconds
    status.details[1].Pack(retry)
    restored = error_from_status(status.SerializeToString())
    assert isinstance(restored, CapacityError)
    assert 0.0 <= restored.retry_after_s <= 86_400.0
    status_from_error(restored)  # can be told on


def test_lone_surrogates_in_a_message_do_not_break_the_answer():
    """A text that no client could decode is replaced, not raised about."""
    assert str(error_from_rpc(over_the_wire(EngineError("a\ud800b")))) == "a?b"

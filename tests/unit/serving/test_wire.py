"""Request bytes that protobuf refuses are explained by the path of the field."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from paceline.serving.wire import malformed_request
from paceline.v1 import draft_pb2, router_pb2

MARK = "@@MARK@@"


def violations(data, message_type=router_pb2.GenerateRequest):
    with pytest.raises(DecodeError):
        message_type.FromString(data)
    return malformed_request(data, message_type.DESCRIPTOR).violations


def spoil(message, bad=b"ab\xff@@@@@"):
    data = message.SerializeToString()
    assert data.count(MARK.encode()) == 1
    assert len(bad) == len(MARK)
    return data.replace(MARK.encode(), bad)


CHAT = router_pb2.ChatInput(
    messages=[
        router_pb2.ChatMessage(role="user", content="a"),
        router_pb2.ChatMessage(role=MARK, content="b"),
    ]
)
NAMED = [
    (router_pb2.GenerateRequest(text=MARK), "text"),
    (router_pb2.GenerateRequest(chat=CHAT), "chat.messages[1].role"),
    (
        router_pb2.GenerateRequest(tokens=router_pb2.TokenInput(ids=range(300)), stop=["a", "b", MARK]),
        "stop[2]",
    ),
    (router_pb2.GenerateRequest(text="é", max_tokens=3, decoding={"drafter": MARK}), "decoding.drafter"),
    (
        router_pb2.GenerateRequest(sampling={"logit_bias": {5: 1.0}, "seed": 2**64 - 1}, request_id=MARK),
        "request_id",
    ),
    (
        draft_pb2.LinkRequest(
            update=draft_pb2.LinkUpdate(
                opens=[draft_pb2.SequenceOpen(), draft_pb2.SequenceOpen(token_ids=[1, 2], drafter=MARK)]
            )
        ),
        "update.opens[1].drafter",
    ),
]


@pytest.mark.parametrize(("message", "field"), NAMED, ids=[field for _, field in NAMED])
def test_the_field_that_is_not_utf8_is_named(message, field):
    """Nested messages, lists, oneofs and fields after packed numbers are all found."""
    (violation,) = violations(spoil(message), type(message))
    assert violation.field == field
    assert violation.description == "byte 0xff at offset 2 is not UTF-8"


def test_every_bad_field_is_listed():
    """One answer names all of them."""
    data = router_pb2.GenerateRequest(text="XX", stop=["ok", "XX"], task_type="XX").SerializeToString()
    fields = [v.field for v in violations(data.replace(b"XX", b"\xc3\x28"))]
    assert fields == ["text", "stop[1]", "task_type"]


def test_a_list_of_bad_fields_has_an_end():
    """A request with a thousand bad strings gets a short answer."""
    data = router_pb2.GenerateRequest(stop=["X"] * 1000).SerializeToString().replace(b"X", b"\xff")
    assert len(violations(data)) == 16


def test_a_request_of_very_many_fields_is_not_walked_to_its_end():
    """The walk is bounded: it runs on the event loop."""
    data = router_pb2.GenerateRequest(stop=["a"] * 300_000 + ["X"]).SerializeToString().replace(b"X", b"\xff")
    assert [v.field for v in violations(data)] == ["request"]


TRUNCATED = [
    (b"\x0a\x05ab", "text", "truncated: 5 bytes announced, 2 left"),
    (b"\x0a", "text", "truncated inside a number"),
    (b"\x12\x06\x0a\x04\x0a\x09ab", "chat.messages[0].role", "truncated: 9 bytes announced, 2 left"),
    (b"\x22\x05\x09\x00\x00\x00", "sampling", "truncated: 5 bytes announced, 4 left"),
    (b"\x22\x04\x09\x00\x00\x00\x00", "sampling.temperature", "truncated: 8 bytes expected, 3 left"),
    (b"\x00\x00", "request", "field number 0 does not exist"),
    (b"\x28" + b"\xff" * 11, "max_tokens", "a number of more than 10 bytes"),
    (b"\x0f", "text", "wire type 7 cannot stand here"),
]


@pytest.mark.parametrize(("data", "field", "description"), TRUNCATED)
def test_where_the_bytes_stop_being_a_message_is_named(data, field, description):
    """Truncated and corrupt requests name the innermost field that was being read."""
    (violation,) = violations(data)
    assert (violation.field, violation.description) == (field, description)


@given(st.binary(max_size=200))
def test_any_bytes_that_protobuf_refuses_get_at_least_one_violation(data):
    """No bytes make the explanation itself fail."""
    try:
        router_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        found = malformed_request(data, router_pb2.GenerateRequest.DESCRIPTOR).violations
        assert found
        assert all(v.field and v.description for v in found)


@given(st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_a_good_request_with_some_bytes_changed_is_explained_too(position, patch):
    """Near-misses of real requests: each one that is refused has a named field."""
    message = router_pb2.GenerateRequest(
        chat=CHAT,
        sampling={"temperature": 0.5, "logit_bias": {3: 1.5}},
        stop=["x", "yy"],
        request_id="id",
        task_type="qa",
    )
    data = message.SerializeToString()
    position %= len(data)
    data = data[:position] + patch + data[position + len(patch) :]
    try:
        router_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        assert malformed_request(data, router_pb2.GenerateRequest.DESCRIPTOR).violations

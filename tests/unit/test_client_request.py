"""What the client puts on the wire."""

import pytest

from paceline.client import Client, generate_request
from paceline.errors import InvalidRequestError
from paceline.types import Mode
from paceline.v1 import common_pb2


def test_what_is_not_said_is_left_to_the_server():
    """No default of the client's own travels: unset fields stay unset."""
    request = generate_request(text="Hi")
    assert request.WhichOneof("input") == "text"
    assert request.sampling == common_pb2.SamplingParams()
    assert not request.HasField("max_tokens")
    assert not request.HasField("decoding")


def test_zero_is_a_value():
    """Temperature 0 and seed 0 are sent, not dropped."""
    request = generate_request(text="Hi", temperature=0.0, seed=0)
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")


def test_an_empty_prompt_reaches_the_server():
    """The server refuses it in words; the client does not turn it into a missing one."""
    assert generate_request(messages=[]).WhichOneof("input") == "chat"
    assert generate_request(token_ids=[]).WhichOneof("input") == "tokens"
    assert generate_request(text="").WhichOneof("input") == "text"


def test_a_decoding_wish_carries_what_was_said_only():
    """A drafter without a mode leaves the mode automatic."""
    request = generate_request(token_ids=[1], mode=Mode.SPECULATIVE, drafter="ngram", k=3)
    assert (request.decoding.mode, request.decoding.drafter, request.decoding.k) == (2, "ngram", 3)
    assert not generate_request(token_ids=[1], mode=Mode.PLAIN).decoding.HasField("drafter")


def test_exactly_one_form_of_prompt():
    """None and two are programming errors."""
    with pytest.raises(ValueError, match="exactly one"):
        generate_request()
    with pytest.raises(ValueError, match="exactly one"):
        generate_request(text="a", token_ids=[1])


def test_integers_beyond_the_wire_are_refused_by_name():
    """A negative seed cannot be written as an unsigned integer; all such fields are named at once."""
    with pytest.raises(InvalidRequestError) as caught:
        generate_request(
            text="a", seed=-1, max_tokens=2**32, k=-2, top_k=-3, priority=2**31, stop_token_ids=[7, -7]
        )
    assert [one.field for one in caught.value.violations] == [
        "sampling.top_k",
        "sampling.seed",
        "max_tokens",
        "stop_token_ids",
        "decoding.k",
        "priority",
    ]
    assert caught.value.violations[2].description == "4294967296; expected 0 to 4294967295"
    edge = generate_request(text="a", seed=2**64 - 1, priority=-(2**31))
    assert (edge.sampling.seed, edge.priority) == (2**64 - 1, -(2**31))


def test_bytes_that_are_no_text_are_refused_by_name():
    """A command line's byte 0xff comes as a lone surrogate: no field takes it, all are named."""
    bad = "a\udcff"
    with pytest.raises(InvalidRequestError) as caught:
        generate_request(
            messages=[("system", "a"), ("user", bad)],
            stop=["a", bad],
            task_type=bad,
            drafter=bad,
            request_id=bad,
            tenant=bad,
            metadata={"a": bad},
        )
    assert [one.field for one in caught.value.violations] == [
        "chat.messages",
        "stop",
        "task_type",
        "decoding.drafter",
        "request_id",
        "tenant",
        "metadata",
    ]
    with pytest.raises(InvalidRequestError, match=r"text: is no Unicode text: a\\udcff"):
        generate_request(text=bad)


@pytest.mark.parametrize(
    "address", ["", "here", "127.0.0.1:99999", "127.0.0.1:0", ":7440", "http://a:1", "a:\u0661"]
)
def test_an_address_is_host_and_port(address):
    """Anything else is refused before anything is called."""
    with pytest.raises(InvalidRequestError, match="expected host:port"):
        Client(address)

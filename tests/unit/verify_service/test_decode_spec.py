"""What the verify tier takes as a request: priors that its controller could not calculate with are refused by name."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import codec
from paceline.errors import InvalidRequestError, PeerLostError
from paceline.types import AcceptancePrior, Plan
from paceline.v1 import verify_pb2
from verify_service.decode_spec import decode_spec
from verify_service.sequence import DecodeSpec

IDENTITY = ("abc", "w4a8", "cpu", "lean", "deterministic")
RUNNER: Any = SimpleNamespace(info=SimpleNamespace(max_context=100, vocab_size=50, identity=IDENTITY))
GOOD = AcceptancePrior(0.5, 8.0, (0.9, 0.5))


def spec(prior: AcceptancePrior) -> DecodeSpec:
    plan = replace(Plan.speculative("suffix", 4, ""), prior=prior)
    request = verify_pb2.DecodeRequest(prompt_ids=[1], max_tokens=5, plan=codec.plan_to_pb(plan))
    return decode_spec(request, RUNNER, None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        *(({"mean": value}, "mean") for value in (math.nan, math.inf, -0.1, 0.0, 1.0, 2.0)),
        *(({"strength": value}, "strength") for value in (math.nan, math.inf, -math.inf, 0.0, -1.0)),
        *(({"by_position": (0.5, value)}, "by_position[1]") for value in (math.nan, -math.inf, 0.0, 1.0)),
        ({"by_position": (0.5,) * 65}, "by_position"),
    ],
)
def test_a_prior_that_is_none_is_refused(change: dict[str, Any], field: str) -> None:
    """One NaN would be in what is believed of the drafter for all later requests."""
    with pytest.raises(InvalidRequestError) as raised:
        spec(replace(GOOD, **change))
    assert [one.field for one in raised.value.violations] == [f"plan.prior.{field}"]


def test_a_prior_comes_as_it_was_sent() -> None:
    """Mean, strength and positions."""
    assert spec(GOOD).plan.prior == GOOD


def test_a_request_for_another_model_is_not_continued() -> None:
    """A replica that was started anew with other weights, or another precision, within the router's two seconds between two looks."""
    request = verify_pb2.DecodeRequest(prompt_ids=[1], committed_ids=[2, 3], max_tokens=5, identity=IDENTITY)
    assert decode_spec(request, RUNNER, None).committed_ids == (2, 3)
    request.identity[1] = "float32"
    with pytest.raises(PeerLostError, match="serves another model now"):
        decode_spec(request, RUNNER, None)
    del request.identity[:]
    assert decode_spec(request, RUNNER, None).committed_ids == (2, 3)

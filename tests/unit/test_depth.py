"""Why a round is as deep as it is, in words."""

from paceline.depth import why_so_deep
from paceline.types import DepthReason, ProposalOutcome, RoundRecord


def record(reason: DepthReason) -> RoundRecord:
    """Two of four, one more row costing 0.9 ms for 0.4 ms worth."""
    return RoundRecord(
        0, 10, 2, 1, 0, 2, ProposalOutcome.USED, "d", 1, 3, *[0.001] * 6,
        asked=2, depth_reason=reason, expected_tokens=1.309, next_worth_s=0.0004, next_cost_s=0.0009,
    )  # fmt: skip


def test_the_price_of_the_row_that_was_left_out_is_named() -> None:
    """Expected tokens, and what one more row would have cost for what it was worth."""
    assert why_so_deep(record(DepthReason.COST), 4) == (
        "asked 2 of 4: 1.31 expected tokens; one more row does not pay: 0.9 ms for 0.4 ms worth"
    )


def test_a_price_that_contradicts_the_reason_is_not_named() -> None:
    """A row that is worth more than it costs was not left out for its price alone."""
    cheap = record(DepthReason.COST)._replace(next_cost_s=0.0001)
    assert why_so_deep(cheap, 4) == "asked 2 of 4: 1.31 expected tokens; one more row does not pay"


def test_every_reason_has_its_words_and_silence_has_none() -> None:
    """A round of an older replica says nothing."""
    for reason in DepthReason:
        assert bool(why_so_deep(record(reason), 4)) == (reason is not DepthReason.UNSAID)

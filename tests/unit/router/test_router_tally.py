"""What a cut or a lost replica does to the counts and the times."""

import pytest

from paceline.types import ProposalOutcome, RoundRecord, Timings
from router.tally import Tally, cut_round


def round_(index: int = 0, *, drafted: int = 4, accepted: int = 3, committed: int = 4) -> RoundRecord:
    return RoundRecord(
        index, 10, drafted, accepted, 0, committed, ProposalOutcome.USED, "ngram", 1, 5, 1.0, 2.0, 3.0, 4.0, 3.5, 0.5
    )  # fmt: skip


@pytest.mark.parametrize(
    ("delivered", "accepted", "ignored", "committed"),
    [(4, 3, 0, 4), (3, 3, 0, 3), (2, 2, 1, 2), (1, 1, 2, 1)],
)
def test_accepted_tokens_behind_the_cut_are_ignored(delivered, accepted, ignored, committed) -> None:
    """Accepted and ignored together stay what agreed; drafted stays what was verified."""
    cut = cut_round(round_(), delivered)
    assert (cut.accepted, cut.ignored, cut.committed, cut.drafted) == (accepted, ignored, committed, 4)


def test_rounds_are_renumbered_over_replicas_and_the_list_is_bounded() -> None:
    """The index counts within the request; what is left out is counted."""
    tally = Tally(0.0, keep_rounds=2)
    indices = []
    for now in (1.0, 2.0):
        tally.admitted(0.1, now)
        indices.append(tally.run(None, 1, now))
        indices += [tally.run(round_(i), 4, now) for i in range(2)]
    assert indices == [None, 0, 1, None, 2, 3]
    assert [record.index for record in tally.rounds] == [0, 1]
    assert tally.rounds_elided == 2
    assert tally.stats.num_rounds == 4


def test_an_outage_counts_as_decode_time_that_no_round_explains() -> None:
    """First replica lost, second goes on: what lies between, its queue and prefill too, is overhead of the decode time."""
    tally = Tally(0.0, keep_rounds=9)
    tally.admitted(0.5, 1.0)
    tally.run(None, 1, 3.0)
    tally.run(round_(), 4, 14.0)
    tally.admitted(0.25, 20.0)
    tally.run(None, 1, 21.0)
    tally.finished(Timings(queue_s=0.25, prefill_s=1.0, decode_s=7.0, verify_s=6.0))
    timings = tally.timings(now=30.0)
    assert timings.queue_s == 0.5
    assert timings.prefill_s == 2.0
    assert timings.decode_s == 21.0 - 3.0
    assert timings.verify_s == 4.0 + 6.0
    assert timings.overhead_s == 18.0 - 10.0 - 6.0
    assert timings.time_to_first_token_s == 3.0
    assert timings.total_s == 30.0


def test_a_measured_decode_time_is_never_below_its_rounds() -> None:
    """Two runs that arrive together were still decoded one after the other."""
    tally = Tally(0.0, keep_rounds=9)
    tally.admitted(0.0, 1.0)
    tally.run(None, 1, 2.0)
    tally.run(round_(), 4, 2.0)
    timings = tally.timings(now=2.0)
    assert timings.decode_s == 10.0
    assert timings.overhead_s == 0.0


def test_a_request_without_a_token_has_no_time_to_the_first() -> None:
    """Zero, not a guess."""
    assert Tally(5.0, keep_rounds=1).timings(now=6.0) == Timings(total_s=1.0)

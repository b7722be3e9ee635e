"""A block whose distributions cannot be such costs that block, and the fault is counted; the coupled law never looks."""

import math

import pytest

from paceline.link import Fate, Stamp
from paceline.types import DraftDistribution, Law, Plan, ProposalOutcome, SamplingParams
from verify_service.distributions import Fault, fault_of
from verify_service.drafts import Drafts
from verify_service.link_port import Offer, Proposal
from verify_service.sequence import DecodeSpec, Sequence

GOOD = DraftDistribution((3, 7), (0.25, 0.75))
BAD = {
    "too few": ([7, 3], (GOOD,), Fault.COUNT),
    "too many": ([7], (GOOD, GOOD), Fault.COUNT),
    "empty": ([7], (DraftDistribution((), ()),), Fault.TOKENS),
    "numbers missing": ([7], (DraftDistribution((3, 7), (1.0,)),), Fault.TOKENS),
    "one token twice": ([7], (DraftDistribution((7, 7), (0.5, 0.5)),), Fault.TOKENS),
    "beyond the vocabulary": ([7], (DraftDistribution((7, 10), (0.5, 0.5)),), Fault.TOKENS),
    "negative": ([7], (DraftDistribution((3, 7), (-0.5, 1.5)),), Fault.NUMBERS),
    "zero": ([7], (DraftDistribution((3, 7), (1.0, 0.0)),), Fault.NUMBERS),
    "NaN": ([7], (DraftDistribution((3, 7), (math.nan, 1.0)),), Fault.NUMBERS),
    "infinite": ([7], (DraftDistribution((3, 7), (math.inf, 1.0)),), Fault.NUMBERS),
    "sum": ([7], (DraftDistribution((3, 7), (0.25, 0.5)),), Fault.SUM),
    "without the draft token": ([4], (GOOD,), Fault.ABSENT),
}


def test_a_sound_block_has_no_fault():
    """A sum a little off 1 is rounding."""
    assert fault_of([7, 3], [GOOD, DraftDistribution((3,), (0.995,))], 10) is None


@pytest.mark.parametrize(("token_ids", "distributions", "fault"), BAD.values(), ids=BAD.keys())
def test_each_fault_is_named(token_ids, distributions, fault):
    """The first that is found."""
    assert fault_of(token_ids, distributions, 10) is fault


def asked(law: Law, sampling: SamplingParams | None = None) -> tuple[Drafts, Sequence]:
    """One sequence that has asked for up to four tokens."""
    spec = DecodeSpec(
        request_id="r",
        prompt_ids=(1, 2, 3),
        committed_ids=(),
        sampling=sampling or SamplingParams(),
        max_tokens=20,
        stop_ids=frozenset(),
        plan=Plan.speculative("d", 4, "test", law),
    )
    sequence = Sequence(1, spec, lambda event: None, arrived=0.0)
    sequence.tokens.append(4)
    drafts = Drafts(vocab_size=10, wait_s=0.5, clock=lambda: 100.0)
    drafts.link_up(Port(), {"d": Offer("1")})
    drafts.advance(sequence, 1, 4)
    return drafts, sequence


class Port:
    """A link that nobody reads."""

    endpoint = "a"

    def __getattr__(self, name):
        return lambda *args: None


@pytest.mark.parametrize("law", [Law.RATIO, Law.BLOCK])
@pytest.mark.parametrize(("token_ids", "distributions", "fault"), BAD.values(), ids=BAD.keys())
def test_a_broken_block_is_no_block_and_nobody_waits(law, token_ids, distributions, fault):
    """The round goes on plainly at once, the fault is counted, and the next block is used."""
    drafts, sequence = asked(law)
    drafts.proposed("a", [Proposal(Stamp(1, 1, 4), token_ids, 0.0, distributions)], 100.0)
    assert drafts.awaiting(sequence, 100.0) is None
    block = drafts.take(sequence, 100.0)
    assert (block.token_ids, block.outcome) == ([], ProposalOutcome.EMPTY)
    assert drafts.faults == {fault: 1}
    sequence.tokens.append(5)
    drafts.advance(sequence, 1, 4)
    drafts.proposed("a", [Proposal(Stamp(1, 1, 5), [7], 0.0, (GOOD,))], 100.0)
    block = drafts.take(sequence, 100.0)
    assert (block.token_ids, block.distributions) == ([7], (GOOD,))
    assert drafts.fates[Fate.APPLY] == 2


def test_guesses_without_distributions_are_used_under_every_law():
    """Look-up drafters draw nothing: each guess counts as certain."""
    for law in Law:
        drafts, sequence = asked(law)
        drafts.proposed("a", [Proposal(Stamp(1, 1, 4), [7, 8], 0.0)], 100.0)
        block = drafts.take(sequence, 100.0)
        assert (block.token_ids, block.distributions) == ([7, 8], ())


@pytest.mark.parametrize(
    ("law", "sampling"),
    [(Law.COUPLED, SamplingParams()), (Law.RATIO, SamplingParams(temperature=0.0))],
    ids=["coupled", "temperature 0"],
)
def test_where_nothing_is_sampled_distributions_are_not_read(law, sampling):
    """Even broken ones: the guesses count by themselves."""
    drafts, sequence = asked(law, sampling)
    assert sequence.law is Law.COUPLED
    broken = (DraftDistribution((), (math.nan,)),)
    drafts.proposed("a", [Proposal(Stamp(1, 1, 4), [7], 0.0, broken)], 100.0)
    block = drafts.take(sequence, 100.0)
    assert (block.token_ids, block.distributions) == ([7], ())
    assert not drafts.faults

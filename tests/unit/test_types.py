"""Values: sums over rounds, ratios without data, what counts as greedy."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.types import (
    Law,
    Mode,
    Plan,
    ProposalOutcome,
    RoundRecord,
    SamplingParams,
    SpeculativeStats,
    Timings,
)


def round_record(**changes) -> RoundRecord:
    values = {
        "index": 0,
        "base_len": 10,
        "drafted": 0,
        "accepted": 0,
        "ignored": 0,
        "committed": 1,
        "outcome": ProposalOutcome.NONE,
        "drafter": "",
        "batch_sequences": 1,
        "batch_rows": 1,
        "draft_s": 0.0,
        "network_s": 0.0,
        "wait_s": 0.0,
        "verify_s": 0.0,
        "forward_s": 0.0,
        "accept_s": 0.0,
    }
    return RoundRecord(**(values | changes))


def used(drafted: int, accepted: int, ignored: int = 0) -> RoundRecord:
    committed = accepted if ignored else accepted + 1
    return round_record(
        drafted=drafted,
        accepted=accepted,
        ignored=ignored,
        committed=committed,
        outcome=ProposalOutcome.USED,
        drafter="ngram",
    )


@st.composite
def rounds(draw):
    """Rounds as the verify tier can make them: with a block, or without for each of the reasons."""
    drafted = draw(st.integers(0, 8))
    if not drafted:
        outcome = draw(st.sampled_from([o for o in ProposalOutcome if o is not ProposalOutcome.USED]))
        return round_record(outcome=outcome)
    accepted = draw(st.integers(0, drafted))
    return used(drafted, accepted, draw(st.integers(0, drafted - accepted)))


@given(st.lists(rounds(), max_size=40))
def test_statistics_are_sums_over_rounds(records):
    """Every number is a sum over the rounds; acceptance is a ratio of sums in [0, 1]; the histogram counts rounds."""
    stats = SpeculativeStats()
    for record in records:
        stats = stats.plus(record)
    blocks = [record for record in records if record.drafted]
    assert stats.num_rounds == len(records)
    assert stats.num_spec_steps == len(blocks) == sum(stats.acceptance_histogram)
    assert stats.num_draft_tokens == sum(record.drafted for record in blocks)
    assert stats.num_accepted_draft_tokens == sum(record.accepted for record in blocks)
    assert stats.num_accepted_draft_tokens == sum(j * n for j, n in enumerate(stats.acceptance_histogram))
    assert stats.num_ignored_draft_tokens == sum(record.ignored for record in blocks)
    assert stats.num_accepted_draft_tokens + stats.num_ignored_draft_tokens <= stats.num_draft_tokens
    for outcome, count in [
        (ProposalOutcome.LATE, stats.num_late_rounds),
        (ProposalOutcome.UNAVAILABLE, stats.num_unavailable_rounds),
        (ProposalOutcome.EMPTY, stats.num_empty_rounds),
    ]:
        assert count == sum(record.outcome is outcome for record in records)
    if blocks:
        assert stats.draft_acceptance_rate == stats.num_accepted_draft_tokens / stats.num_draft_tokens
        assert 0.0 <= stats.draft_acceptance_rate <= 1.0
        committed = sum(record.committed for record in blocks)
        assert stats.mean_acceptance_length == committed / len(blocks)
    else:
        assert stats.draft_acceptance_rate is None
        assert stats.mean_acceptance_length is None


def test_acceptance_is_a_ratio_of_sums_not_a_mean_of_ratios():
    """1 of 1 and 0 of 7 is 1/8, not 1/2."""
    stats = SpeculativeStats().plus(used(1, 1)).plus(used(7, 0))
    assert stats.draft_acceptance_rate == 1 / 8
    assert stats.mean_acceptance_length == 3 / 2
    assert stats.acceptance_histogram == (1, 1)


def test_plus_leaves_the_old_sums_alone():
    """Statistics are values."""
    before = SpeculativeStats().plus(used(4, 2))
    after = before.plus(used(4, 4))
    assert before.acceptance_histogram == (0, 0, 1)
    assert after.acceptance_histogram == (0, 0, 1, 0, 1)


def test_a_round_is_the_sum_of_its_parts():
    """draft + network + wait + verify; forward and accept are parts of verify."""
    record = round_record(draft_s=1.0, network_s=0.5, wait_s=0.25, verify_s=2.0, forward_s=1.5, accept_s=0.25)
    assert record.total_s == 3.75


def test_overhead_is_what_no_part_explains():
    """decode less draft, network, wait and verify."""
    timings = Timings(decode_s=10.0, draft_s=1.0, network_s=0.5, wait_s=0.5, verify_s=7.0, queue_s=99.0)
    assert timings.overhead_s == 1.0


def test_the_default_parameters_switch_every_processor_off():
    """Temperature 1, no truncation, no penalty, no history needed."""
    params = SamplingParams()
    assert not params.greedy
    assert not params.needs_history
    assert SamplingParams(temperature=0.0).greedy


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_needs_history(name):
    """A penalty other than its neutral value reads earlier tokens."""
    assert SamplingParams(**{name: 0.5}).needs_history


def test_plans_say_what_they_are():
    """A plain plan has no drafter, no block length and no law; a speculative one is coupled by default."""
    plain = Plan.plain("because")
    assert (plain.mode, plain.drafter, plain.k_max, plain.law) == (Mode.PLAIN, "", 0, None)
    speculative = Plan.speculative("ngram", 4, "table")
    assert (speculative.mode, speculative.k_max, speculative.law) == (Mode.SPECULATIVE, 4, Law.COUPLED)


def test_values_are_frozen():
    """Nothing that travels can be changed by who receives it."""
    for value in (SamplingParams(), Plan.plain(""), SpeculativeStats(), Timings()):
        field = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, 1)
    with pytest.raises(AttributeError):
        round_record().index = 1

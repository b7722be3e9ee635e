"""The text of a trace: one line a round, bars that add up, sums."""

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cluster import waterfall
from paceline.client import RequestSummary
from paceline.types import DepthReason, Plan, ProposalOutcome, RoundRecord, SpeculativeStats, Timings, Usage


def round_record(
    index: int,
    *,
    outcome=ProposalOutcome.USED,
    asked=4,
    drafted=4,
    accepted=2,
    times=(0.001, 0.002, 0.0, 0.030),
):
    return RoundRecord(
        index,
        100 + index,
        drafted,
        accepted,
        0,
        accepted + 1,
        outcome,
        "ngram",
        1,
        drafted + 1,
        *times,
        times[3],
        0.0,
        asked=asked,
    )


def summary(rounds, *, elided=0) -> RequestSummary:
    stats = SpeculativeStats()
    for record in rounds:
        stats = stats.plus(record)
    draft, network, wait, verify = (
        sum(getattr(record, f"{part}_s") for record in rounds) for part in waterfall.PARTS
    )
    return RequestSummary(
        "req-1",
        "0af7651916cd43dd8448eb211c80319c",
        "summarization",
        Plan.speculative("ngram", 4, "table: summarization"),
        "stop",
        Usage(60, 12),
        Timings(
            0.001, 0.05, draft + network + wait + verify + 0.002, draft, network, wait, verify, 0.06, 0.2
        ),
        stats,
        tuple(rounds),
        elided,
    )


ROUNDS = [
    round_record(0),
    round_record(1, outcome=ProposalOutcome.LATE, drafted=0, accepted=0, times=(0.0, 0.0, 0.05, 0.03)),
    round_record(2, outcome=ProposalOutcome.EMPTY, drafted=0, accepted=0),
    round_record(
        3, outcome=ProposalOutcome.NONE, asked=0, drafted=0, accepted=0, times=(0.0, 0.0, 0.0, 0.02)
    ),
]


def test_a_round_says_its_block_its_outcome_and_its_times():
    """Asked, drafted and accepted tokens, outcome, the four times in ms and when the round began stand in its line."""
    lines = list(waterfall.draw(summary(ROUNDS), width=120))
    first = next(line for line in lines if line.split()[:1] == ["0"])
    assert first.split()[:10] == ["0", "0", "4", "4", "2", "used", "1.0", "2.0", "0.0", "30.0"]
    second = next(line for line in lines if line.split()[:1] == ["1"])
    assert second.split()[:10] == ["1", "33", "4", "-", "-", "late", "0.0", "0.0", "50.0", "30.0"]
    assert any(line.split()[2:6] == ["-", "-", "-", "plain"] for line in lines)


def test_what_was_asked_for_and_what_was_drafted_stand_apart():
    """A drafter may give less than it was asked for: both numbers are there, named above."""
    lines = list(waterfall.draw(summary([round_record(0, asked=6, drafted=3, accepted=1)]), width=120))
    head = next(line.split() for line in lines if line.split()[:1] == ["round"])
    row = next(line.split() for line in lines if line.split()[:1] == ["0"])
    # "at ms" is two words
    assert dict(zip(head[3:6], row[2:5], strict=True)) == {"ask": "6", "drf": "3", "acc": "1"}
    assert any("ask = tokens asked for (k), drf = drafted and verified" in line for line in lines)


def test_bars_can_be_read_without_colour():
    """Every part has a glyph of its own, named in the legend, in ASCII where the terminal wants it."""
    text = "\n".join(waterfall.draw(summary(ROUNDS), width=120, glyphs=waterfall.ASCII))
    assert "d draft  . network  w wait  # verify" in text
    assert text.isascii() or text.replace("·", "").isascii()
    assert "\x1b" not in text


def test_lines_fit_the_terminal():
    """No line is wider than the terminal, at any width from 75 on."""
    for width in (75, 80, 100, 200):
        assert max(map(len, waterfall.draw(summary(ROUNDS), width=width))) <= width


def test_the_longest_round_fills_the_width():
    """All bars share one scale; a column is the most that rounding takes."""
    lines = list(waterfall.draw(summary(ROUNDS), width=120))
    longest = next(line for line in lines if line.split()[:1] == ["1"])
    assert 119 <= len(longest) <= 120


def test_sums_and_ratios_close_the_page():
    """Decode time is split into its parts with their shares; acceptance is a ratio of sums."""
    text = "\n".join(waterfall.draw(summary(ROUNDS), width=160))
    assert "decode 168.0 ms = draft 2.0 ms (1%) + network 4.0 ms (2%) + wait 50.0 ms (30%)" in text
    assert "overhead 2.0 ms (1%)" in text
    assert "4 rounds, 1 with a block: 2 of 4 draft tokens accepted (50%), 3.00 tokens a block" in text
    assert "1 without a guess, 1 late" in text


def test_rounds_left_out_are_counted():
    """What the server dropped and what is not drawn is said."""
    text = "\n".join(waterfall.draw(summary(ROUNDS, elided=5), width=100, max_rounds=1))
    assert "... 3 more rounds: 1 empty, 1 late, 1 plain; ms: draft 1.0, network 2.0, wait 50.0" in text
    assert "... 5 more rounds, of which the router kept the sums only" in text


def test_a_long_trace_is_a_page():
    """So many rounds are drawn unless more are asked for."""
    rounds = [round_record(index) for index in range(200)]
    lines = list(waterfall.draw(summary(rounds), width=100))
    assert len(lines) < waterfall.MAX_ROUNDS + 14
    assert any("160 more rounds: 160 used" in line for line in lines)
    assert len(list(waterfall.draw(summary(rounds), width=100, max_rounds=10**9))) > 200


def test_outcomes_are_explained_where_they_occur():
    """Every word of the column ``out``, and only those that stand on the page."""
    text = "\n".join(waterfall.draw(summary(ROUNDS), width=200))
    assert (
        "out: used = a block was verified, empty = the drafter had no guess, late = no block came in time, "
        "plain = no block was wanted" in text
    )
    assert "absent" not in text
    assert set(waterfall.OUTCOMES) == set(ProposalOutcome)


def test_a_request_without_rounds_has_sums_only():
    """A request of one token, or one that failed, is still a page."""
    lines = list(waterfall.draw(summary([]), width=100))
    assert any("0 rounds" in line for line in lines)


@given(st.lists(st.floats(0, 10), min_size=4, max_size=4), st.floats(0.1, 100))
def test_a_bar_is_as_long_as_its_parts_together(parts, scale):
    """Rounding never stretches the whole, and each part is right to one column."""
    drawn = waterfall.bar(parts, scale, waterfall.BLOCKS)
    assert abs(len(drawn) - sum(parts) * scale) <= 0.5 + 1e-6
    for glyph, part in zip(waterfall.BLOCKS, parts, strict=True):
        assert abs(drawn.count(glyph) - part * scale) <= 1


def test_the_largest_of_small_parts_is_the_one_shown():
    """0.2 draft, 2.3 network, 0.3 wait in one column of 4 ms: the network, whatever lies at the rounding edges."""
    drawn = waterfall.bar((0.0002, 0.0023, 0.0003, 0.0393), 1 / 0.004, waterfall.ASCII)
    assert drawn == "." + "#" * 10


def test_one_is_not_many():
    """Numbers and nouns agree."""
    assert "1 round," in waterfall.stats_in_words(summary(ROUNDS[:1]).speculative)
    assert waterfall.tokens_in_words(Usage(60, 1, 48)) == "60 (48 from memory) + 1 token"


def test_the_figures_of_a_depth_are_said_to_be_the_last_rounds():
    """Rounds of one reason may have asked for different numbers of tokens."""
    rounds = [record._replace(depth_reason=DepthReason.COST, expected_tokens=1.5) for record in ROUNDS[:3]]
    rounds[2] = rounds[2]._replace(asked=1)
    text = "\n".join(waterfall.draw(summary([*rounds, ROUNDS[3]]), width=200))
    assert "why so deep: 3 rounds, the last one asked 1 of 4: 1.50 expected tokens; one more row" in text


def test_no_time_of_a_request_is_without_a_name():
    """Queue, prefill, decode and what is left to the router and the wire are the total."""
    request = summary(ROUNDS)
    request = replace(request, timings=replace(request.timings, total_s=0.25))
    text = " ".join(" ".join(waterfall.draw(request, width=100)).split())
    found = re.search(
        r"queue ([\d.]+) \+ prefill ([\d.]+) \+ decode ([\d.]+) \+ router and wire ([\d.]+) = total ([\d.]+) ms",
        text,
    )
    assert found is not None
    *parts, total = map(float, found.groups())
    assert abs(sum(parts) - total) < 0.3

"""A request's rounds as text: one line a round, its parts drawn as a bar, sums at the end. No colour is needed.

A round is draft, network, wait and verify one after the other. All bars share one scale, the longest round filling
the width, so that lengths can be compared down the page; the time at which a round began stands in figures.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence

from cluster.words import counted
from paceline.client import RequestSummary
from paceline.depth import why_so_deep
from paceline.types import Mode, Plan, ProposalOutcome, RoundRecord, SpeculativeStats, Timings, Usage

BLOCKS = "▒·░█"
"""Draft, network, wait, verify."""
ASCII = "d.w#"
"""The same for a terminal that cannot print them."""

PARTS = ("draft", "network", "wait", "verify")
MIN_BAR = 10
MAX_ROUNDS = 40
"""Rounds drawn where nobody says how many: a page or so."""

OUTCOMES = {
    ProposalOutcome.USED: ("used", "a block was verified"),
    ProposalOutcome.EMPTY: ("empty", "the drafter had no guess"),
    ProposalOutcome.LATE: ("late", "no block came in time"),
    ProposalOutcome.UNAVAILABLE: ("absent", "no drafter could be asked"),
    ProposalOutcome.CUT: ("cut", "a block was not worth verifying"),
    ProposalOutcome.NONE: ("plain", "no block was wanted"),
}
"""What the column ``out`` says of a round, and what it means."""

_HEAD = "  round  at ms ask drf acc out      draft    net   wait verify  "
_COUNTS = "ask = tokens asked for (k), drf = drafted and verified, acc = accepted"


def draw(
    request: RequestSummary, *, width: int = 100, glyphs: str = BLOCKS, max_rounds: int = MAX_ROUNDS
) -> Iterator[str]:
    """The lines of one request, none wider than ``width`` (from about 75 on)."""
    yield from _wrap(_title(request), width)
    rounds = request.rounds[:max_rounds]
    if rounds:
        bar_width = max(MIN_BAR, width - len(_HEAD))
        longest = max(record.total_s for record in rounds)
        scale = bar_width / longest if longest > 0 else 0.0
        legend = "  ".join(f"{glyph} {part}" for glyph, part in zip(glyphs, PARTS, strict=True))
        per_column = f"{1000 / scale:.1f} ms a column" if scale else ""
        yield from _wrap(f"{legend}    {per_column}", width)
        yield from _wrap(_COUNTS, width)
        seen = [words for outcome, words in OUTCOMES.items() if any(r.outcome is outcome for r in rounds)]
        yield from _wrap("out: " + ", ".join(f"{word} = {meaning}" for word, meaning in seen), width)
        if why := _depths(rounds, request.plan.k_max):
            yield from _wrap(why, width)
        yield _HEAD.rstrip()
        at_s = 0.0
        for record in rounds:
            yield (_row(record, at_s) + bar(_parts(record), scale, glyphs)).rstrip()
            at_s += record.total_s
    yield from _left_out(request.rounds[max_rounds:], request.rounds_elided, width)
    yield from _sums(request.timings, request.speculative, width, glyphs)


def plan_in_words(plan: Plan) -> str:
    """For example ``speculative ngram k=8``."""
    return "plain" if plan.mode is Mode.PLAIN else f"speculative {plan.drafter} k={plan.k_max}"


def bar(parts: Sequence[float], columns_per_s: float, glyphs: str) -> str:
    """The parts one after the other; the whole is as long as the sum says.

    Columns are allotted by largest remainder: what is left after the whole columns goes to the parts that have most
    of a column, so the one column of three small parts shows the largest of them.
    """
    exact = [part * columns_per_s for part in parts]
    columns = [math.floor(length) for length in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: columns[index] - exact[index])
    for index in by_remainder[: max(0, round(sum(exact)) - sum(columns))]:
        columns[index] += 1
    return "".join(glyph * length for glyph, length in zip(glyphs, columns, strict=True))


def _title(request: RequestSummary) -> str:
    usage = request.usage
    law = f", law {request.plan.law.value}" if request.plan.law else ""
    trace = f" · trace {request.trace_id}" if request.trace_id else ""
    return (
        f"{request.request_id} · {request.task_type or 'task unknown'} · {plan_in_words(request.plan)}{law} "
        f"({request.plan.reason}) · {tokens_in_words(usage)} · {request.outcome}{trace}"
    )


def _row(record: RoundRecord, at_s: float) -> str:
    asked = str(record.asked) if record.asked else "-"  # an older replica does not say
    drafted, accepted = (str(record.drafted), str(record.accepted)) if record.drafted else ("-", "-")
    times = "".join(f"{_ms(part):>7}" for part in _parts(record))
    return f"{record.index:>7}{at_s * 1000:>7.0f}{asked:>4}{drafted:>4}{accepted:>4} {_outcome(record):<6}{times}  "


def _left_out(rounds: Sequence[RoundRecord], num_elided: int, width: int) -> Iterator[str]:
    """What is not drawn: the rounds at hand with their outcomes and times, the others counted."""
    if rounds:
        outcomes = ", ".join(
            f"{count} {word}"
            for outcome, (word, _) in OUTCOMES.items()
            if (count := sum(record.outcome is outcome for record in rounds))
        )
        sums = [sum(times) for times in zip(*map(_parts, rounds), strict=True)]
        times = ", ".join(f"{part} {_ms(time_s)}" for part, time_s in zip(PARTS, sums, strict=True))
        yield from _wrap(f"  ... {counted(len(rounds), 'more round')}: {outcomes}; ms: {times}", width)
    if num_elided:
        yield from _wrap(
            f"  ... {counted(num_elided, 'more round')}, of which the router kept the sums only", width
        )


def _depths(rounds: Sequence[RoundRecord], k_max: int) -> str:
    """Why so many tokens were drafted: each reason with how often it was, and the last round's figures."""
    last = {record.depth_reason: record for record in rounds}
    said = []
    for reason, record in last.items():
        if words := why_so_deep(record, k_max):
            number = sum(one.depth_reason is reason for one in rounds)
            said.append(f"{counted(number, 'round')}, {'the last one ' if number > 1 else ''}{words}")
    return "why so deep: " + " | ".join(said) if said else ""


def _outcome(record: RoundRecord) -> str:
    return OUTCOMES[record.outcome][0]


def _sums(timings: Timings, stats: SpeculativeStats, width: int, glyphs: str) -> Iterator[str]:
    spent = (timings.draft_s, timings.network_s, timings.wait_s, timings.verify_s)
    decode_s = timings.decode_s
    shares = [
        f"{part} {_ms(time_s)} ms{_share(time_s, decode_s)}"
        for part, time_s in zip(
            (*PARTS, "overhead"),
            (*spent, timings.overhead_s),
            strict=True,
        )
    ]
    yield from _wrap(f"  decode {_ms(decode_s)} ms = " + " + ".join(shares), width)
    if decode_s > 0:
        yield f"  |{bar(spent, (width - 4) / max(decode_s, sum(spent)), glyphs):<{width - 4}}|"
    rest_s = max(timings.total_s - timings.queue_s - timings.prefill_s - decode_s, 0.0)
    yield from _wrap(
        f"  queue {_ms(timings.queue_s)} + prefill {_ms(timings.prefill_s)} + decode {_ms(decode_s)} + router and wire {_ms(rest_s)} "
        f"= total {_ms(timings.total_s)} ms; first token after {_ms(timings.time_to_first_token_s)} ms",
        width,
    )
    yield from _wrap("  " + stats_in_words(stats), width)


def tokens_in_words(usage: Usage) -> str:
    """Prompt and output, and how much of the prompt was in memory already."""
    cached = f" ({usage.cached_prompt_tokens} from memory)" if usage.cached_prompt_tokens else ""
    return f"{usage.prompt_tokens}{cached} + {counted(usage.completion_tokens, 'token')}"


def stats_in_words(stats: SpeculativeStats) -> str:
    """What speculation did, in one sentence."""
    text = counted(stats.num_rounds, "round")
    if stats.num_spec_steps:
        text += (
            f", {stats.num_spec_steps} with a block: {stats.num_accepted_draft_tokens} of "
            f"{stats.num_draft_tokens} draft tokens accepted"
        )
    if stats.draft_acceptance_rate is not None:
        text += f" ({stats.draft_acceptance_rate:.0%})"
    if stats.mean_acceptance_length is not None:
        text += f", {stats.mean_acceptance_length:.2f} tokens a block"
    for number, word in (
        (stats.num_empty_rounds, "without a guess"),
        (stats.num_late_rounds, "late"),
        (stats.num_unavailable_rounds, "without a drafter"),
        (stats.num_ignored_draft_tokens, "accepted behind the end of the output"),
    ):
        if number:
            text += f", {number} {word}"
    return text


def _parts(record: RoundRecord) -> tuple[float, float, float, float]:
    return record.draft_s, record.network_s, record.wait_s, record.verify_s


def _ms(time_s: float) -> str:
    return f"{time_s * 1000:.1f}"


def _share(time_s: float, whole_s: float) -> str:
    return f" ({time_s / whole_s:.0%})" if whole_s > 0 else ""


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="    ", break_long_words=False) or [""]

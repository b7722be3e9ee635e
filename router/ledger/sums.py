"""The ledger's sums: whole numbers only, so that they are exact whatever the order in which they were added.

Times are nanoseconds. A row is one int64 vector: the fields below, then drafted and accepted by position.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from paceline.types import ProposalOutcome, RoundRecord

Row = NDArray[np.int64]

COUNTS = (
    "requests", "failed", "prompt_tokens", "output_tokens",
    "rounds", "spec_rounds", "late_rounds", "empty_rounds", "unavailable_rounds",
    "drafted", "accepted", "ignored", "emitted",
)  # fmt: skip
TIMES = (
    "draft_ns", "exposed_draft_ns", "network_ns", "wait_ns", "verify_ns",
    "queue_ns", "prefill_ns", "decode_ns", "ttft_ns", "total_ns",
)  # fmt: skip
SPEED = (
    "timed_requests",
    "timed_tokens",
    "timed_tick",
    "timed_tick_tick",
    "timed_tick_token",
    "timed_token_token",
)
"""Of requests with decode time: tokens behind the first one, decode time in ticks, and sums of products of the two."""
YIELD = ("spec_requests", "accepted_accepted", "accepted_drafted", "drafted_drafted")
"""Of requests that drafted: sums of products of their accepted and drafted tokens, for the spread between requests."""
MAX_POSITIONS = 16
"""Draft positions kept apart; deeper ones are in the totals only."""
FIELDS = (
    *COUNTS,
    *TIMES,
    *SPEED,
    *YIELD,
    *(f"drafted_{j}" for j in range(MAX_POSITIONS)),
    *(f"accepted_{j}" for j in range(MAX_POSITIONS)),
)
TICK_S = 1e-5
_LONGEST_S = 1e9  # what is more was not measured, and would not fit
MOST = 2**62 - 1
"""Sums stop here: one more of them than fits would make all of a window negative."""
AT: Mapping[str, int] = {name: index for index, name in enumerate(FIELDS)}
"""Column of each field."""
_DRAFTED, _ACCEPTED = AT["drafted_0"], AT["accepted_0"]
_OUTCOMES = {
    ProposalOutcome.LATE: AT["late_rounds"],
    ProposalOutcome.EMPTY: AT["empty_rounds"],
    ProposalOutcome.UNAVAILABLE: AT["unavailable_rounds"],
}


def no_sums() -> Row:
    """A row of zeros."""
    return np.zeros(len(FIELDS), dtype=np.int64)


def nanoseconds(seconds: float) -> int:
    """Rounded once, here: sums of whole numbers do not depend on their order. A difference of clock readings is never below 0."""
    return round(min(max(0.0, seconds), _LONGEST_S) * 1e9)


class RoundSums:
    """Sums over rounds. Plain integers: a round must cost the router microseconds."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = [0] * len(FIELDS)

    def add(self, record: RoundRecord) -> None:
        """One round more."""
        values = self.values
        values[_ROUNDS] += 1
        values[_EMITTED] += record.committed
        exposed_ns = nanoseconds(record.draft_s)
        values[_DRAFT_NS] += exposed_ns + nanoseconds(record.hidden_draft_s)
        values[_EXPOSED_NS] += exposed_ns
        values[_NETWORK_NS] += nanoseconds(record.network_s)
        values[_WAIT_NS] += nanoseconds(record.wait_s)
        values[_VERIFY_NS] += nanoseconds(record.verify_s)
        if (outcome := _OUTCOMES.get(record.outcome)) is not None:
            values[outcome] += 1
        if record.drafted:
            values[_SPEC_ROUNDS] += 1
            values[_DRAFTED_ALL] += record.drafted
            values[_ACCEPTED_ALL] += record.accepted
            values[_IGNORED] += record.ignored
            for position in range(min(record.drafted, MAX_POSITIONS)):
                values[_DRAFTED + position] += 1
            for position in range(min(record.accepted, MAX_POSITIONS)):
                values[_ACCEPTED + position] += 1

    def row(self) -> Row:
        """As a row of its own."""
        return np.array(self.values, dtype=np.int64)


_ROUNDS, _EMITTED, _SPEC_ROUNDS = AT["rounds"], AT["emitted"], AT["spec_rounds"]
_DRAFTED_ALL, _ACCEPTED_ALL, _IGNORED = AT["drafted"], AT["accepted"], AT["ignored"]
_DRAFT_NS, _EXPOSED_NS, _NETWORK_NS = AT["draft_ns"], AT["exposed_draft_ns"], AT["network_ns"]
_WAIT_NS, _VERIFY_NS = AT["wait_ns"], AT["verify_ns"]


def add_speed(row: Row, tokens: int, decode_s: float) -> None:
    """The decode speed of one request: ``tokens`` behind its first one took ``decode_s``."""
    if tokens < 1 or decode_s <= 0:
        return
    ticks = round(decode_s / TICK_S)
    for name, value in zip(
        SPEED, (1, tokens, ticks, ticks * ticks, ticks * tokens, tokens * tokens), strict=True
    ):
        row[AT[name]] += value


def add_yield(row: Row, accepted: int, drafted: int) -> None:
    """What one request's drafting gave."""
    if drafted:
        products = (1, accepted * accepted, accepted * drafted, drafted * drafted)
        for name, value in zip(YIELD, products, strict=True):
            row[AT[name]] += value


def total(rows: Iterable[Row]) -> Row:
    """Their sum."""
    result = no_sums()
    for row in rows:
        add_to(result, row)
    return result


def add_to(row: Row, more: Row) -> None:
    """Add ``more`` to ``row``, neither of them negative nor beyond MOST."""
    row += more
    np.minimum(row, MOST, out=row)


def drafted_by_position(row: Row) -> Row:
    """[MAX_POSITIONS]: rounds that drafted so deep."""
    return row[_DRAFTED : _DRAFTED + MAX_POSITIONS]


def accepted_by_position(row: Row) -> Row:
    """[MAX_POSITIONS]: rounds whose draft was accepted so deep."""
    return row[_ACCEPTED : _ACCEPTED + MAX_POSITIONS]

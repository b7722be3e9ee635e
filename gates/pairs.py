"""Pairs of runs of the same requests, plain and speculative, and ratios of the two."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gates.bootstrap import Estimate, Floats, ratio_of_quantiles, ratio_of_sums
from gates.evidence import PLAIN, SPECULATIVE, Seen
from router.ledger.sums import AT, Row

METRICS = {"whole request": "total_ns", "first token": "ttft_ns", "time a token": "gap"}
"""Times of a request whose P99 is compared, and the column of each."""


class Verdict(Enum):
    """Whether something holds."""

    YES = "yes"
    NO = "no"
    OPEN = "not shown"


@dataclass(frozen=True, slots=True)
class PairOfRuns:
    """One request, decoded both ways. ``again``: plainly another time, to see how far plain decoding moves by itself."""

    plain: Seen
    speculative: Seen
    again: Seen | None = None

    @property
    def same(self) -> bool:
        """Whether both gave the same tokens."""
        return self.plain.token_ids == self.speculative.token_ids


def pairs_of(seen: Iterable[Seen]) -> list[PairOfRuns]:
    """Requests that were recorded once each way, found by their key; others are left out."""
    by_key: dict[str, dict[str, list[Seen]]] = {}
    again: dict[str, Seen] = {}
    for one in seen:
        if one.key and one.again:
            again[one.key] = one
        elif one.key:
            by_key.setdefault(one.key, {}).setdefault(one.way, []).append(one)
    return [
        PairOfRuns(ways[PLAIN][0], ways[SPECULATIVE][0], again.get(key))
        for key, ways in by_key.items()
        if [len(ways.get(way, ())) for way in (PLAIN, SPECULATIVE)] == [1, 1]
    ]


def column(rows: Sequence[Row], name: str) -> Floats:
    """One entry a row."""
    return np.array([float(row[AT[name]]) for row in rows])


def count(seen: Seen, name: str) -> int:
    """Of one request."""
    return int(seen.row[AT[name]])


def times(seen: Sequence[Seen], name: str) -> Floats:
    """Seconds, one a request; ``name`` as in METRICS."""
    rows = [one.row for one in seen]
    if METRICS[name] == "gap":
        return column(rows, "decode_ns") * 1e-9 / np.maximum(column(rows, "timed_tokens"), 1)
    return column(rows, METRICS[name]) * 1e-9


def p99_ratio(after: Sequence[Seen], before: Sequence[Seen], name: str) -> Estimate | None:
    """P99 of ``after`` over that of ``before``, the same requests."""
    return ratio_of_quantiles(times(after, name), times(before, name), 0.99)


def decode_ratio(before: Sequence[Seen], after: Sequence[Seen]) -> Estimate | None:
    """Decode time of ``before`` over that of ``after``, same requests: above 1 the second is faster."""
    timed = [
        (a, b) for a, b in zip(before, after, strict=True) if count(a, "decode_ns") and count(b, "decode_ns")
    ]
    if not timed:
        return None
    rows = [[both[way].row for both in timed] for way in (0, 1)]
    spent = [column(one, "decode_ns") for one in rows]
    # Under a sampled law outputs differ in length: times a token, then.
    tokens = [column(one, "timed_tokens") for one in rows]
    return ratio_of_sums(spent[0] * tokens[1] / np.maximum(tokens[0], 1), spent[1])

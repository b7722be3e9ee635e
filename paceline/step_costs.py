"""What steps of a target cost, as a table: T(rows, sequences, context) between the measured points and beyond them.

``verify_service.costs`` measures it; the controller decides by it, and a plan or a replay reckons with it. No torch.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

CONTEXT = 256
"""Tokens of each sequence in the measured steps."""
LEAST_SHARE = 0.25
"""Of a measured time, left at least where shorter contexts are reckoned from it: what looking back costs is measured beside others."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Step times in seconds. ``curves``: per number of sequences, ascending, its (rows, seconds) ascending.

    All measured with ``context`` tokens a sequence; ``row_key_s`` comes on top for each token that a row looks back on
    beyond that, ``sequence_key_s`` for each token of context of a sequence.
    """

    curves: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]
    context: int = CONTEXT
    row_key_s: float = 0.0
    sequence_key_s: float = 0.0
    origin: str = "given"

    def step_s(self, rows: int, sequences: int, context: float | None = None) -> float:
        """The time of a step, between the measured points and beyond them."""
        curves = self.curves
        counts = [count for count, _ in curves]
        at = bisect_left(counts, sequences)
        extra = rows - sequences
        if at == len(counts):
            # More sequences than were measured: each costs at least what a further row does there.
            count, curve = curves[-1]
            base_s = _at(curve, rows)
        elif counts[at] == sequences or at == 0:
            count, curve = curves[at]
            base_s = _at(curve, count + extra) if counts[at] == sequences else _at(curve, max(rows, 1))
        else:
            low, low_curve = curves[at - 1]
            high, high_curve = curves[at]
            part = (sequences - low) / (high - low)
            base_s = (1 - part) * _at(low_curve, low + extra) + part * _at(high_curve, high + extra)
        if context is None:
            return base_s
        beyond = context - self.context
        more_s = beyond * (rows * self.row_key_s + sequences * self.sequence_key_s)
        return max(base_s + more_s, LEAST_SHARE * base_s)


def _at(curve: tuple[tuple[int, float], ...], rows: int) -> float:
    """Linear between the points; beyond the last one its steepness goes on."""
    if len(curve) == 1:
        return curve[0][1] * max(1.0, rows / curve[0][0])
    last = len(curve) - 1
    at = 1
    while at < last and curve[at][0] < rows:
        at += 1
    (left, left_s), (right, right_s) = curve[at - 1], curve[at]
    return max(left_s + (right_s - left_s) * (rows - left) / (right - left), 0.5 * curve[0][1])


def table_of(
    points: Iterable[tuple[int, int, float]],
    *,
    context: int = CONTEXT,
    row_key_s: float = 0.0,
    sequence_key_s: float = 0.0,
    origin: str = "given",
) -> CostTable:
    """A table from (sequences, rows, seconds).

    Less work never costs more: a step takes at most what any step of as many sequences and rows, or more, has taken. Nor does a step
    cost more than two that have half of its rows each. What disturbs a measurement only lengthens it, so the lesser of two times that
    contradict each other is the sound one.
    """
    given = list(points)

    def least_s(sequences: int, rows: int) -> float:
        found = (step_s for more, wider, step_s in given if more >= sequences and wider >= rows)
        return min(found, default=inf)

    by_count: dict[int, list[tuple[int, float]]] = {}
    for sequences, rows, _ in given:
        half = max(-(-rows // 2), sequences)
        bound_s = min(least_s(sequences, rows), 2 * least_s(sequences, half))
        by_count.setdefault(sequences, []).append((rows, bound_s))
    curves = tuple((count, tuple(sorted(curve))) for count, curve in sorted(by_count.items()))
    return CostTable(curves, context, row_key_s, sequence_key_s, origin)

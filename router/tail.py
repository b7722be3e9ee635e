"""Is one tail heavier than another? An exact test by counting, for times of any distribution.

Take the b-th longest of m plain times. If the n speculative ones were no longer, all m + n would be alike, and k of the
speculative ones beyond that mark would mean that of the k + b - 1 longest of all at least k are speculative: a
hypergeometric chance (a precedence test: Nelson 1963; Balakrishnan and Ng 2006). "No longer" is after division by the slack.
Times come in bins; only whole bins beyond the mark count, which errs on the safe side.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from router.quantiles import GROWTH, edge, log_choose

SLACK = 1.05
"""A tail may be so much longer."""
ALPHA = 0.005
"""Chance of calling a tail heavier that is not."""


@dataclass(frozen=True, slots=True)
class TailTest:
    """``chance``: of so many beyond the mark if the tail were no heavier."""

    mark_s: float
    plain: int
    plain_beyond: int
    speculative: int
    speculative_beyond: int
    chance: float

    @property
    def heavier(self) -> bool:
        """Whether it is called so."""
        return self.chance <= ALPHA

    @property
    def words(self) -> str:
        """With its figures."""
        return (
            f"{self.speculative_beyond} of {self.speculative} took longer than {1e3 * self.mark_s:.1f} ms where {self.plain_beyond} "
            f"of {self.plain} plain ones did (chance {self.chance:.1g})"
        )


def compare_tails(
    speculative: Mapping[int, int], plain: Mapping[int, int], *, p: float = 0.99, slack: float = SLACK
) -> TailTest | None:
    """Counts by bin (``router.quantiles``); the mark is at the p-quantile of the plain ones. None without values."""
    m, n = sum(plain.values()), sum(speculative.values())
    if not m or not n:
        return None
    beyond = max(1, math.ceil((1 - p) * m))
    left = beyond
    mark = max(plain)
    for number in sorted(plain, reverse=True):
        mark = number
        left -= plain[number]
        if left <= 0:
            break
    mark += math.ceil(math.log(slack) / GROWTH)
    found = sum(count for number, count in speculative.items() if number > mark)
    return TailTest(edge(mark + 1), m, beyond, n, found, chance_beyond(m, beyond, n, found))


def chance_beyond(plain: int, plain_beyond: int, speculative: int, found: int) -> float:
    """That at least ``found`` of so many speculative ones lie beyond the mark at that plain one, all being alike."""
    if not found:
        return 1.0
    drawn, everything = found + plain_beyond - 1, plain + speculative
    whole = log_choose(everything, drawn)
    terms = (
        log_choose(speculative, k) + log_choose(plain, drawn - k) - whole
        for k in range(found, min(drawn, speculative) + 1)
        if drawn - k <= plain
    )
    return min(1.0, sum(map(math.exp, terms)))

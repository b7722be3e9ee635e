"""Phrases that an output repeats on the spot: what a rollback by one too few leaves behind."""

import math
from collections.abc import Sequence

from router.quantiles import log_choose

SHORTEST, LONGEST = 3, 12
"""Tokens of a phrase. Shorter ones repeat in good text as well ("ha ha")."""


def repeated_at(token_ids: Sequence[int]) -> int | None:
    """Where a phrase begins that is followed at once by itself; None where there is none."""
    ids = list(token_ids)
    for at in range(len(ids)):
        for length in range(SHORTEST, LONGEST + 1):
            end = at + 2 * length
            if end > len(ids):
                break
            if ids[at : at + length] == ids[at + length : end] and len(set(ids[at : at + length])) > 1:
                return at
    return None


def fisher(first: int, of_first: int, second: int, of_second: int) -> float:
    """Chance that the first of two groups has so many or more, were both alike (Fisher's exact test, one-sided)."""
    both, everything = first + second, of_first + of_second
    whole = log_choose(everything, both)
    return min(
        1.0,
        sum(
            math.exp(log_choose(of_first, k) + log_choose(of_second, both - k) - whole)
            for k in range(first, min(both, of_first) + 1)
            if both - k <= of_second
        ),
    )

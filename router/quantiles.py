"""Quantiles of a stream, with bounds that hold at every moment at once, however often one looks.

At the true p-quantile the number of values at or below it is binomial. The binomial martingale of Robbins (1970, "Statistical methods related to the law of the
iterated logarithm"; Ding, Gandy, Hahn 2017 for its use as a sequential test) says: with chance 1 - alpha no n ever has
b(n, p, count) < alpha / (n + 1). Turned round, the quantile lies between two order statistics (Howard, Ramdas 2022 treat
quantiles so). Exact for any distribution; the only error is the width of a bin, 2 %.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

GROWTH = math.log(1.02)
"""Of a bin, as a logarithm."""
_SMALLEST_S = 1e-6


def bin_of(seconds: float) -> int:
    """The bin of a duration: bins grow by 2 %."""
    return math.floor(math.log(max(seconds, _SMALLEST_S) / _SMALLEST_S) / GROWTH)


def edge(number: int) -> float:
    """Where a bin begins, in seconds."""
    return _SMALLEST_S * math.exp(GROWTH * number)


@dataclass(frozen=True, slots=True)
class Quantile:
    """An estimate in seconds and its bounds."""

    low: float
    estimate: float
    high: float


def quantile(counts: Mapping[int, int], p: float, alpha: float) -> Quantile | None:
    """The p-quantile of the values whose bins were counted; None without values."""
    n = sum(counts.values())
    if not n:
        return None
    least, most = count_bounds(n, p, alpha)
    target = max(1, math.ceil(n * p))
    low, estimate, high = 0.0, 0.0, math.inf
    seen = 0
    for number in sorted(counts):
        before, seen = seen, seen + counts[number]
        if before < least <= seen:
            low = edge(number)
        if before < target <= seen:
            estimate = (edge(number) + edge(number + 1)) / 2
        if before < most + 1 <= seen:
            high = edge(number + 1)
    return Quantile(low, estimate, high)


def count_bounds(n: int, p: float, alpha: float) -> tuple[int, int]:
    """Fewest and most values at or below the p-quantile that alpha allows among n."""
    floor = math.log(alpha / (n + 1))
    mode = min(n, math.floor((n + 1) * p))
    return (
        _first(0, mode, lambda count: _log_binomial(n, p, count) >= floor),
        n - _first(0, n - mode, lambda left: _log_binomial(n, p, n - left) >= floor),
    )


@cache
def fewest(p: float, alpha: float) -> int:
    """Values from which the p-quantile has a bound on either side."""
    hardest = math.log(max(p, 1 - p))
    return next(n for n in itertools.count(1) if n * hardest < math.log(alpha / (n + 1)))


def _first(low: int, high: int, true_at: Callable[[int], bool]) -> int:
    """The smallest number that is true, where all behind it are, and ``high`` is."""
    while low < high:
        middle = (low + high) // 2
        if true_at(middle):
            high = middle
        else:
            low = middle + 1
    return low


def log_choose(n: int, k: int) -> float:
    """Logarithm of the number of ways to take k of n."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_binomial(n: int, p: float, count: int) -> float:
    return log_choose(n, count) + count * math.log(p) + (n - count) * math.log1p(-p)

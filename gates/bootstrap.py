"""Intervals of what pairs of requests say: resampling whole pairs, so that what two runs of one request share cancels.

Percentile bootstrap (Efron 1979), two-sided 95 %. A request is one observation. The 99th percentile of fewer than some
hundred requests is next to their longest one, and its interval as wide as that: a verdict on it is then often "not shown".
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_RESAMPLED = 2000
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value between its bounds, from ``count`` requests."""

    low: float
    value: float
    high: float
    count: int


def bootstrap(columns: Floats, statistic: Callable[[Floats], Floats], *, seed: int = 1) -> Estimate | None:
    """``statistic`` of [..., requests, columns], over the second last axis. None below two requests or where it is not finite."""
    count = len(columns)
    if count < 2:
        return None
    value = float(statistic(columns[None])[0])
    if not np.isfinite(value):
        return None
    dice = np.random.default_rng(seed)
    drawn = statistic(columns[dice.integers(0, count, (_RESAMPLED, count))])
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return None
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Estimate(min(float(low), value), value, max(float(high), value), count)


def ratio_of_sums(first: Floats, second: Floats, *, seed: int = 1) -> Estimate | None:
    """Sum of ``first`` over sum of ``second``, one entry of each a request."""

    def ratio(drawn: Floats) -> Floats:
        sums = drawn.sum(axis=-2)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = sums[..., 0] / sums[..., 1]
        return found

    return bootstrap(np.stack([first, second], axis=1), ratio, seed=seed)


def ratio_of_quantiles(after: Floats, before: Floats, p: float, *, seed: int = 1) -> Estimate | None:
    """The p-quantile of ``after`` over that of ``before``, pairs resampled."""

    def ratio(drawn: Floats) -> Floats:
        both = np.quantile(drawn, p, axis=-2, method="higher")
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = both[..., 0] / both[..., 1]
        return found

    return bootstrap(np.stack([after, before], axis=1), ratio, seed=seed)

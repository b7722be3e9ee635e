"""How far plain decoding moves from itself: the same requests, plainly, twice. What is smaller than that cannot be judged.

An interval from resampled requests does not know that the machine was slower for a minute. Two plain runs of every request,
one on either side of the speculative one, do: whatever they differ by is not the drafter's doing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gates.bootstrap import Estimate
from gates.pairs import METRICS, PairOfRuns, Verdict, decode_ratio, p99_ratio


@dataclass(frozen=True, slots=True)
class Noise:
    """As a share, in either direction: 0.2 is a fifth. Empty where nothing was decoded plainly twice."""

    speed: float | None = None
    tails: Mapping[str, float] = field(default_factory=dict)
    """Of P99, by the names of METRICS."""

    @property
    def known(self) -> bool:
        """Whether plain decoding was compared with itself."""
        return self.speed is not None


def noise_of(pairs: Sequence[PairOfRuns]) -> Noise:
    """From the pairs with a second plain run."""
    both = [(pair.plain, pair.again) for pair in pairs if pair.again is not None]
    first, second = [one for one, _ in both], [one for _, one in both]
    if len(both) < 2:
        return Noise()
    tails = {name: moved for name in METRICS if (moved := _moved(p99_ratio(second, first, name))) is not None}
    return Noise(_moved(decode_ratio(first, second)), tails)


def _moved(ratio: Estimate | None) -> float | None:
    """The farther end of the interval of a ratio that would be 1 on a quiet machine."""
    if ratio is None or ratio.low <= 0:
        return None
    return math.exp(max(abs(math.log(ratio.low)), abs(math.log(ratio.high)))) - 1


def beyond(ratio: Estimate, mark: float, moved: float | None) -> bool:
    """Whether a ratio is farther from its mark than plain decoding is from itself."""
    return abs(math.log(max(ratio.value, 1e-9) / mark)) > math.log1p(moved or 0.0)


def against(ratio: Estimate, mark: float) -> Verdict:
    """Yes: surely at or below the mark; no: surely above."""
    if ratio.low > mark:
        return Verdict.NO
    return Verdict.YES if ratio.high <= mark else Verdict.OPEN

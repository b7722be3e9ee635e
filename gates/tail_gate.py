"""The tail: is P99 after at most 1.05 of P99 before?

Of n requests the slowest one lies beyond the 99th percentile with a chance of 1 - 0.99^n, whatever the times are distributed
like. From 299 requests on that is 95 %: fewer cannot show that a tail holds. That one is broken thirty can.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gates.bootstrap import Estimate
from gates.noise import Noise, against, beyond, noise_of
from gates.pairs import METRICS, PairOfRuns, Verdict, p99_ratio, times

TAIL_LIMIT = 1.05
FEWEST_FOR_TAIL = 30
"""Requests below which the slowest one is no tail: no NO."""
ENOUGH_FOR_P99 = math.ceil(math.log(0.05) / math.log(0.99))
"""And below which there is no YES."""
WHOLE = "whole request"


@dataclass(frozen=True, slots=True)
class TailGate:
    """P99 after over P99 before, by time; the total time must be shown to hold, the others not to fail."""

    verdict: Verdict
    total: Estimate | None
    before_s: float
    after_s: float
    others: Mapping[str, Estimate] = field(default_factory=dict)
    requests: int | None = None
    """None where bounds of another kind were taken (a ledger's)."""
    noisy: tuple[str, ...] = ()
    """Times of which something would be said, were it more than what plain decoding moved by itself."""

    @property
    def lines(self) -> Mapping[str, Estimate]:
        """Every time that was compared."""
        return ({} if self.total is None else {WHOLE: self.total}) | dict(self.others)

    @property
    def failing(self) -> tuple[str, ...]:
        """The times that made it a no."""
        if self.verdict is not Verdict.NO:
            return ()
        return tuple(
            name for name, one in self.lines.items() if one.low > TAIL_LIMIT and name not in self.noisy
        )


def tail_gate(pairs: Sequence[PairOfRuns], noise: Noise | None = None) -> TailGate:
    """Held against pairs of runs."""
    noise = noise if noise is not None else noise_of(pairs)
    after, before = [pair.speculative for pair in pairs], [pair.plain for pair in pairs]
    lines = {name: one for name in METRICS if (one := p99_ratio(after, before, name)) is not None}
    total = lines.pop(WHOLE, None)
    if total is None:
        return TailGate(Verdict.OPEN, None, 0.0, 0.0, requests=len(pairs))
    said = {name: against(one, TAIL_LIMIT) for name, one in ({WHOLE: total} | lines).items()}
    # Of the others only a no counts.
    heard = {name for name, verdict in said.items() if verdict is Verdict.NO or name == WHOLE}
    noisy = tuple(
        name
        for name in heard
        if said[name] is not Verdict.OPEN
        and not beyond(({WHOLE: total} | lines)[name], TAIL_LIMIT, noise.tails.get(name))
    )
    verdict = said[WHOLE] if WHOLE not in noisy else Verdict.OPEN
    if any(said[name] is Verdict.NO and name not in noisy for name in said):
        verdict = Verdict.NO
    elif noisy:
        verdict = Verdict.OPEN
    needed = {Verdict.YES: ENOUGH_FOR_P99, Verdict.NO: FEWEST_FOR_TAIL, Verdict.OPEN: 0}[verdict]
    if len(pairs) < needed:
        verdict = Verdict.OPEN
    p99 = [float(np.quantile(times(way, WHOLE), 0.99, method="higher")) for way in (before, after)]
    return TailGate(verdict, total, p99[0], p99[1], lines, len(pairs), noisy)

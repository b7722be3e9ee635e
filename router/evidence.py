"""What sums say, with bounds that hold however often one looks.

Bounds are asymptotic confidence sequences (Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas: Time-uniform central limit
theory and asymptotic confidence sequences, 2021, equation for the two-sided Gaussian mixture). A request is one
observation: tokens of one request are alike, and counting them one by one would claim far too much.
"""

import math
from dataclasses import dataclass

from paceline.economics import break_even_share
from router.ledger.sums import AT, TICK_S, Row

ALPHA = 0.02
"""Chance that a bound fails at any time at all."""
_TUNED_FOR = 60
"""Requests at which the bounds are tightest."""
MIN_REQUESTS = 12
"""Below so many requests there is no bound: the normal approximation has nothing to stand on."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate between its bounds, from ``count`` requests."""

    low: float
    mean: float
    high: float
    count: int


UNKNOWN = Interval(-math.inf, math.nan, math.inf, 0)


def radius(deviation: float, count: int, alpha: float = ALPHA) -> float:
    """Half the width of the interval around a mean of ``count`` observations with that standard deviation."""
    rho2 = (2 * math.log(1 / alpha) + math.log(1 + 2 * math.log(1 / alpha))) / _TUNED_FOR
    spread = count * rho2 + 1
    return deviation * math.sqrt(2 * spread / (count * count * rho2) * math.log(math.sqrt(spread) / alpha))


def acceptance(row: Row, alpha: float = ALPHA) -> Interval:
    """Accepted over drafted, as a ratio of sums over requests."""
    count, drafted, accepted = (int(row[AT[name]]) for name in ("spec_requests", "drafted", "accepted"))
    if count < MIN_REQUESTS or not drafted:
        return UNKNOWN
    ratio = accepted / drafted
    squares = (
        float(row[AT["accepted_accepted"]])
        - 2 * ratio * float(row[AT["accepted_drafted"]])
        + ratio * ratio * float(row[AT["drafted_drafted"]])
    )
    # All alike so far does not mean that none differs: one request that accepts nothing stands in.
    mean_drafted = drafted / count
    squares = max(squares, 0.0) + (ratio * (1 - ratio) + 0.01) * mean_drafted * mean_drafted
    half = radius(math.sqrt(squares / count) / mean_drafted, count, alpha)
    return Interval(max(0.0, ratio - half), ratio, min(1.0, ratio + half), count)


def seconds_per_token(row: Row, alpha: float = ALPHA) -> Interval:
    """Decode time over tokens behind the first."""
    count, tokens, ticks = (int(row[AT[n]]) for n in ("timed_requests", "timed_tokens", "timed_tick"))
    if count < MIN_REQUESTS or not tokens or not ticks:
        return UNKNOWN
    ratio = ticks / tokens
    squares = (
        float(row[AT["timed_tick_tick"]])
        - 2 * ratio * float(row[AT["timed_tick_token"]])
        + ratio * ratio * float(row[AT["timed_token_token"]])
    )
    mean_tokens = tokens / count
    squares = max(squares, 0.0) + (0.05 * ticks / count) ** 2
    half = radius(math.sqrt(squares / count) / mean_tokens, count, alpha)
    return Interval(max(0.0, ratio - half) * TICK_S, ratio * TICK_S, (ratio + half) * TICK_S, count)


def speed_ratio(plain: Interval, speculative: Interval) -> Interval:
    """How many times as fast the speculative requests were: above 1 speculation pays."""
    if not plain.count or not speculative.count or speculative.mean <= 0:
        return UNKNOWN
    high = plain.high / speculative.low if speculative.low > 0 else math.inf
    return Interval(
        plain.low / speculative.high, plain.mean / speculative.mean, high, min(plain.count, speculative.count)
    )


def break_even(speculative: Row, plain_token_s: float) -> float | None:
    """The accepted share at which a round with a draft is as fast as the plain rounds that would give its tokens.

    A round of t seconds must give t / plain_token_s tokens, its own one among them; the others are accepted ones.
    """
    rounds, drafted = int(speculative[AT["spec_rounds"]]), int(speculative[AT["drafted"]])
    if not rounds or not drafted or plain_token_s <= 0:
        return None
    spent_ns = sum(
        int(speculative[AT[n]]) for n in ("exposed_draft_ns", "network_ns", "wait_ns", "verify_ns")
    )
    # Rounds of the same requests without a draft took about a plain token's time each.
    spent_s = spent_ns * 1e-9 - (int(speculative[AT["rounds"]]) - rounds) * plain_token_s
    return break_even_share(spent_s / rounds, plain_token_s, drafted / rounds)

"""Quantile bounds that hold at every look, lots that are keyed, and the comparison by task."""

import math
import random
from collections import Counter

import pytest

from router.holdout import Holdout, comparisons_from
from router.ledger.group import Group
from router.ledger.sums import no_sums
from router.lot import drawn
from router.quantiles import bin_of, count_bounds, quantile


@pytest.mark.parametrize("p", [0.5, 0.95, 0.99])
def test_bounds_hold_at_every_moment_at_once(p):
    """400 streams of up to 1,500 values, looked at after every one: at most alpha = 5 % ever leave the bounds
    (with the true share at 5 %, more than 34 of 400 have odds under 1 in 1,000).
    """
    rng = random.Random(1)
    bounds = [count_bounds(n, p, 0.05) for n in range(1501)]
    failed = 0
    for _ in range(400):
        count = 0
        for n in range(1, 1501):
            count += rng.random() < p
            low, high = bounds[n]
            if not low <= count <= high:
                failed += 1
                break
    assert failed <= 34


def test_bounds_close_in_on_the_quantile():
    """Of 20,000 exponential times, to a few per cent at the median."""
    rng = random.Random(2)
    counts = Counter(bin_of(rng.expovariate(1)) for _ in range(20_000))
    found = quantile(counts, 0.5, 0.05)
    assert found is not None
    assert found.low < math.log(2) < found.high
    assert found.high / found.low < 1.15
    assert found.low <= found.estimate <= found.high


def test_few_values_say_little():
    """One value bounds no quantile; none gives none."""
    assert quantile({}, 0.5, 0.05) is None
    found = quantile({bin_of(1.0): 1}, 0.5, 0.05)
    assert found is not None
    assert (found.low, found.high) == (0.0, math.inf)


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
def test_lots_are_fair_and_independent(share):
    """20,000 ids: the share within five standard deviations; another purpose or key draws others."""
    ids = [f"request-{i}" for i in range(20_000)]
    chosen = {i for i in ids if drawn(i, "holdout", share)}
    assert abs(len(chosen) - 20_000 * share) <= 5 * math.sqrt(20_000 * share * (1 - share))
    assert chosen == {i for i in ids if drawn(i, "holdout", share)}
    if 0 < share < 1:
        both = sum(drawn(i, "probe", share) for i in chosen)
        assert abs(both - len(chosen) * share) <= 5 * math.sqrt(len(chosen) * share * (1 - share))
        assert chosen != {i for i in ids if drawn(i, "holdout", share, key="another")}


def group(arm: str) -> Group:
    return Group("code", "", "ngram" if arm == "auto" else "", "1", "", "0", "1", arm)


def test_the_comparison_finds_what_is_faster_and_by_how_much():
    """Speculative at half the time: the median's ratio is bounded away from 1 and holds 0.5."""
    rng = random.Random(3)
    holdout = Holdout()
    for arm, scale, requests in (("auto", 0.5, 5000), ("holdout", 1.0, 600), ("asked", 9.0, 100)):
        for _ in range(requests):
            holdout.observe(group(arm), no_sums(), {("total", bin_of(scale * rng.lognormvariate(0, 0.3))): 1})
    found = {c.p: c for c in comparisons_from(holdout.document())}
    assert set(found) == {0.5, 0.95, 0.99}
    median = found[0.5]
    assert median.requests == (5000, 600)
    assert median.ratio.low < 0.5 < median.ratio.high < 0.7


def test_nothing_is_compared_without_both_kinds():
    """Only speculative ones: no comparison."""
    holdout = Holdout()
    holdout.observe(group("auto"), no_sums(), {("total", 700): 5})
    assert comparisons_from(holdout.document()) == []

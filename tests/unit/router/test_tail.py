"""The comparison of tails: exact odds, few false alarms, and a heavy tail seen in a few hundred requests."""

import math
import random
from collections import Counter
from itertools import combinations

import pytest

from router.quantiles import bin_of
from router.tail import ALPHA, chance_beyond, compare_tails


def test_the_chance_is_that_of_counting_all_orders():
    """5 plain, 4 speculative, the mark at the second longest plain one: all 126 orders, counted."""
    orders = list(combinations(range(9), 4))  # ranks of the speculative ones, 8 is the longest
    for found in range(5):
        hits = 0
        for order in orders:
            plain = sorted(set(range(9)) - set(order))
            hits += sum(rank > plain[-2] for rank in order) >= found
        assert chance_beyond(5, 2, 4, found) == pytest.approx(hits / len(orders))


def counts(rng, number, heavy=0.0, factor=1.0):
    return Counter(
        bin_of(factor * math.exp(rng.gauss(-3.5, 0.15)) * (2.5 if rng.random() < heavy else 1.0))
        for _ in range(number)
    )


def test_equal_tails_are_rarely_called_heavier():
    """At most 4 of 400 pairs at odds of 1 in 200 (more has a chance of 1 in 20)."""
    rng = random.Random(1)
    called = sum(compare_tails(counts(rng, 150), counts(rng, 250)).heavier for _ in range(400))
    assert called <= 4
    assert ALPHA == 0.005


def test_a_tail_of_one_in_twelve_is_seen_though_the_mean_is_better():
    """Half the time on the mean, 8 % of the requests 2.5 times as long as theirs usually are: 300 requests are enough."""
    rng = random.Random(2)
    seen = sum(
        compare_tails(counts(rng, 300, heavy=0.08, factor=0.8), counts(rng, 300)).heavier for _ in range(40)
    )
    assert seen >= 38


def test_faster_ones_have_no_heavier_tail_and_nothing_has_none():
    """A shift to the better is no alarm; without values there is no answer."""
    rng = random.Random(3)
    assert not compare_tails(counts(rng, 300, factor=0.6), counts(rng, 300)).heavier
    assert compare_tails({}, {1: 5}) is None

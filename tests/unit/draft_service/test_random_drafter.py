"""The bad drafter is bad in a repeatable way."""

from collections import Counter

from draft_service.drafters import DraftRequest
from draft_service.drafters.random import RandomDrafter
from paceline.types import SamplingParams


def request(length: int, *, seed: int = 0, k: int = 8, vocab_size: int = 50) -> DraftRequest:
    return DraftRequest(1, [0] * length, 1, SamplingParams(seed=seed), k, vocab_size)


def test_same_question_same_guesses():
    """Guesses depend on drafter key, request seed and position alone: not on order, batch or the tokens."""
    first, second = RandomDrafter("a", seed=1), RandomDrafter("b", seed=1)
    batch = [request(5, seed=3), request(9), request(5, seed=4)]
    guesses = first.propose(batch)
    assert guesses == [second.propose([one])[0] for one in batch]
    assert guesses[0] != guesses[2]
    assert RandomDrafter("a", seed=2).propose(batch) != guesses
    assert first.propose([request(6, seed=3, k=7)])[0] == guesses[0][1:], "keyed by position"


def test_guesses_are_spread_over_the_vocabulary():
    """All ids lie below the vocabulary's size, and each of 50 comes up about as often in 8,000 draws.

    The chance that a fair drafter leaves [100, 220] for any id (mean 160, sd 12.5) is below 1 in 10,000.
    """
    drafter = RandomDrafter("random", seed=0)
    counts = Counter(token for seed in range(1000) for token in drafter.propose([request(3, seed=seed)])[0])
    assert set(counts) == set(range(50))
    assert min(counts.values()) >= 100
    assert max(counts.values()) <= 220

"""Single draws follow the processed distribution, on a tiny vocabulary and on a large one."""

import math

import pytest
import torch
from scipy import stats

from paceline.sampling import TokenRow, choose
from paceline.types import SamplingParams

LOGITS = [2.0, 1.5, 0.9, 0.9, 0.0, -0.7, -1.5, -4.0]
NUM = 8_000


def softmax(logits: list[float], temperature: float, kept: list[int]) -> list[float]:
    weights = [math.exp(logit / temperature) if token in kept else 0.0 for token, logit in enumerate(logits)]
    return [weight / math.fsum(weights) for weight in weights]


# Which tokens stay is worked out by hand. At T = 1 the probabilities are
# .404 .245 .135 .135 .055 .027 .012 .001 (cumulated .404 .650 .784 .919 .974 1.00).
CASES = {
    "T=1": ({}, list(range(8))),
    "T=0.5": ({"temperature": 0.5}, list(range(8))),
    "T=2": ({"temperature": 2.0}, list(range(8))),
    "top_k=3": ({"top_k": 3}, [0, 1, 2]),
    "top_p=0.8": ({"top_p": 0.8}, [0, 1, 2, 3]),
    "top_p=0.7": ({"top_p": 0.7}, [0, 1, 2]),
    "min_p=0.2": ({"min_p": 0.2}, [0, 1, 2, 3]),
    "top_k=5, top_p=0.9, T=1": ({"top_k": 5, "top_p": 0.9}, [0, 1, 2, 3]),
}


@pytest.mark.parametrize(("options", "kept"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("key", ["seed", "position"])
def test_draws_follow_the_softmax(options, kept, key):
    """Over 8,000 seeds, and over 8,000 positions of one seed: chi-square p > 1e-5, and nothing excluded appears."""
    if key == "seed":
        rows = [TokenRow(SamplingParams(seed=index, **options), 3) for index in range(NUM)]
    else:
        rows = [TokenRow(SamplingParams(seed=3, **options), index) for index in range(NUM)]
    drawn = choose(torch.tensor(LOGITS).expand(NUM, -1), rows)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(LOGITS)).tolist()
    expected = softmax(LOGITS, options.get("temperature", 1.0), kept)
    assert all(count == 0 for count, probability in zip(counts, expected, strict=True) if probability == 0)
    # Pool what is too rare for chi-square.
    cells = [(count, p * NUM) for count, p in zip(counts, expected, strict=True) if p * NUM >= 5]
    rare = [(count, p * NUM) for count, p in zip(counts, expected, strict=True) if 0 < p * NUM < 5]
    if rare:
        cells.append((sum(count for count, _ in rare), sum(mass for _, mass in rare)))
    statistic = sum((count - mass) ** 2 / mass for count, mass in cells)
    assert stats.chi2.sf(statistic, len(cells) - 1) > 1e-5


def test_successive_draws_are_independent():
    """Pairs of neighbouring positions under one seed: chi-square of independence over 64 cells, p > 1e-5."""
    rows = [TokenRow(SamplingParams(seed=5), position) for position in range(NUM)]
    drawn = torch.tensor(choose(torch.tensor(LOGITS[:6]).expand(NUM, -1), rows))
    table = torch.bincount(drawn[:-1] * 6 + drawn[1:], minlength=36).reshape(6, 6).numpy()
    assert stats.chi2_contingency(table).pvalue > 1e-5


def test_a_flat_large_vocabulary_is_drawn_from_evenly():
    """All of 151,936 equal tokens: 1,000 draws fall evenly into 20 stretches of the vocabulary, p > 1e-5."""
    logits = torch.zeros(1, 151_936)
    rows = [TokenRow(SamplingParams(seed=seed), 1) for seed in range(1_000)]
    drawn = [choose(logits, [row])[0] for row in rows]
    cells = torch.bincount(torch.tensor(drawn) * 20 // 151_936, minlength=20).numpy()
    assert stats.chisquare(cells).pvalue > 1e-5


def test_many_unlikely_tokens_get_their_share_together():
    """One token of .95 and 49,151 that share .05: the rare ones win in 5 % of 2,000 draws, within 4.5 sigma.

    Each rare token wins with probability 1e-6, so this hangs on the tail of the noise.
    """
    logits = torch.zeros(1, 49_152)
    logits[0, 777] = math.log(0.95 / 0.05 * 49_151)
    rare = sum(choose(logits, [TokenRow(SamplingParams(seed=seed), 2)])[0] != 777 for seed in range(2_000))
    assert abs(rare - 100) < 4.5 * math.sqrt(2_000 * 0.05 * 0.95)

"""The draws under the sampled laws: in proportion, keyed by the round where they must be, the same from rounded numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from paceline.sampling import TokenRow, draft_tokens, sample_draft
from paceline.sampling.acceptance import normalised, residual
from paceline.sampling.draws import draw, exponentials, uniform
from paceline.sampling.noise import Domain, exponential, round_key, row_key, token_bits
from paceline.types import DraftDistribution, SamplingParams


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**31), min_size=1, max_size=20))
def test_the_vectorised_exponential_is_the_scalar_one(key, tokens):
    """To the last digits, in both tails."""
    expected = [exponential(token_bits(key, token)) for token in tokens]
    assert exponentials(key, np.array(tokens)) == pytest.approx(expected, rel=1e-14)


def test_draws_come_in_proportion_to_the_weights():
    """4,000 draws, chi-square p > 1e-5; a weight of 0 is never drawn, and scale does not matter."""
    weights = np.array([3.0, 0.0, 1.0, 6.0])
    drawn = [draw(weights, row_key(seed, 7, Domain.REPLACE)) for seed in range(4_000)]
    counts = np.bincount(drawn, minlength=4)
    assert counts[1] == 0
    assert stats.chisquare(counts[[0, 2, 3]], np.array([0.3, 0.1, 0.6]) * 4_000).pvalue > 1e-5
    assert drawn == [draw(weights * 1e-3, row_key(seed, 7, Domain.REPLACE)) for seed in range(4_000)]


def test_named_tokens_are_drawn_by_their_own_noise():
    """A truncated distribution draws what the whole one draws with zeros elsewhere."""
    whole = np.zeros(50)
    whole[[4, 9, 33]] = (0.2, 0.5, 0.3)
    for key in range(200):
        assert draw(np.array([0.5, 0.2, 0.3]), key, np.array([9, 4, 33])) == draw(whole, key)


def test_uniforms_are_uniform_and_domains_do_not_share_them():
    """4,000 positions: Kolmogorov-Smirnov p > 1e-5, and no correlation between domains or rounds beyond 5 sigma."""
    of = {
        (domain, base_len): np.array([uniform(round_key(1, base_len, t, domain)) for t in range(4_000)])
        for domain in (Domain.DRAFT, Domain.ACCEPT)
        for base_len in (10, 11)
    }
    for numbers in of.values():
        assert stats.kstest(numbers, "uniform").pvalue > 1e-5
    for one, other in ((a, b) for a in of for b in of if a < b):
        assert abs(np.corrcoef(of[one], of[other])[0, 1]) < 5 / np.sqrt(4_000)


def test_the_verifier_has_exactly_what_the_drafter_drew_from():
    """The numbers are float32 before the draw, and both ends divide them by the same sum."""
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    rows = [TokenRow(SamplingParams(temperature=0.7, top_p=0.95, seed=3), 20 + i) for i in range(6)]
    for (token, distribution), row in zip(sample_draft(logits, rows, [20] * 6, 8), rows, strict=True):
        assert len(distribution.token_ids) == 8
        assert all(np.float32(prob) == prob for prob in distribution.probs)
        token_ids, probs = normalised(distribution)
        key = round_key(3, 20, row.position, Domain.DRAFT)
        assert token == draw(probs, key, token_ids)
        [seen] = draft_tokens([token], [distribution])
        assert seen.prob == probs[distribution.token_ids.index(token)]
        assert probs.sum() == pytest.approx(1.0, abs=1e-15)


def test_a_draft_is_truncated_to_its_likeliest_tokens_and_no_impossible_ones():
    """top_m bounds the length of what travels; tokens that the processors exclude are not in it."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    rows = [TokenRow(SamplingParams(top_k=2), 5)]
    [(_, distribution)] = sample_draft(logits, rows, [5], 4)
    assert distribution.token_ids == (0, 1)
    [(token, distribution)] = sample_draft(logits, rows, [5], 1)
    assert (token, distribution) == (0, DraftDistribution((0,), (distribution.probs[0],)))


def test_nothing_left_to_replace_from_is_read_as_the_target():
    """Equal distributions leave no residual; a rejection there is rounding, and the target's own draw stands in."""
    target = np.array([0.5, 0.5, 0.0])
    [token] = draft_tokens([0], [DraftDistribution((0, 1), (0.5, 0.5))])
    assert residual(target, token).tolist() == target.tolist()
    assert residual(target, token, 0.8).tolist() == target.tolist()
    assert target.tolist() == [0.5, 0.5, 0.0]

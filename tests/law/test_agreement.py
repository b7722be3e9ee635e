"""How often drafter and target agree under the coupled law (Daliri, Musco, Suresh 2024)."""

import math

import pytest
import torch

from paceline.sampling import TokenRow, choose
from paceline.types import SamplingParams

VOCAB = 7
NUM = 8_000


def agreement(target_probs: list[float], draft_probs: list[float]) -> float:
    """sum_j 1 / sum_i max(p_i / p_j, q_i / q_j), over tokens that both can draw."""
    pairs = list(zip(target_probs, draft_probs, strict=True))
    return math.fsum(
        1.0 / math.fsum(max(p / p_j, q / q_j) for p, q in pairs) for p_j, q_j in pairs if p_j > 0 and q_j > 0
    )


def total_variation(target_probs: list[float], draft_probs: list[float]) -> float:
    return 0.5 * sum(abs(p - q) for p, q in zip(target_probs, draft_probs, strict=True))


def pair(seed: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target, draft = torch.randn(2, VOCAB, generator=generator) * scale
    return target, draft


def measured(target: torch.Tensor, draft: torch.Tensor) -> float:
    """Share of positions and seeds at which the two draw the same token."""
    rows = [TokenRow(SamplingParams(seed=index // 8), index % 8) for index in range(NUM)]
    pairs = zip(choose(target.expand(NUM, -1), rows), choose(draft.expand(NUM, -1), rows), strict=True)
    return sum(a == b for a, b in pairs) / NUM


@pytest.mark.parametrize(("seed", "scale"), [(0, 0.5), (1, 1.5), (2, 3.0)])
def test_agreement_is_what_the_theorem_says(seed, scale):
    """8,000 draws: within 4.5 sigma of the formula (false-alarm odds 7e-6 each), and within the paper's bounds."""
    target, draft = pair(seed, scale)
    target_probs, draft_probs = (torch.softmax(x.double(), -1).tolist() for x in (target, draft))
    expected = agreement(target_probs, draft_probs)
    assert abs(measured(target, draft) - expected) < 4.5 * math.sqrt(expected * (1 - expected) / NUM)
    tv = total_variation(target_probs, draft_probs)
    assert (1 - tv) / (1 + tv) <= expected <= 1 - tv


def test_agreement_with_disjoint_truncations():
    """Tokens that only one side can draw count as disagreement: top_k on the drafter's side alone."""
    target, draft = pair(3, 1.0)
    rows = [TokenRow(SamplingParams(seed=seed), 0) for seed in range(NUM)]
    cut = [TokenRow(SamplingParams(seed=seed, top_k=2), 0) for seed in range(NUM)]
    target_probs = torch.softmax(target.double(), -1).tolist()
    kept = draft.topk(2).indices
    masked = torch.full_like(draft, -math.inf).index_copy(0, kept, draft[kept])
    expected = agreement(target_probs, torch.softmax(masked.double(), -1).tolist())
    pairs = zip(choose(target.expand(NUM, -1), rows), choose(draft.expand(NUM, -1), cut), strict=True)
    share = sum(a == b for a, b in pairs) / NUM
    assert abs(share - expected) < 4.5 * math.sqrt(expected * (1 - expected) / NUM)


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_the_bounds_hold_for_the_formula(scale):
    """(1 - TV) / (1 + TV) <= agreement <= 1 - TV for 300 random pairs; the formula is coded right."""
    for seed in range(300):
        target_probs, draft_probs = (torch.softmax(x.double(), -1).tolist() for x in pair(seed, scale))
        tv = total_variation(target_probs, draft_probs)
        assert (1 - tv) / (1 + tv) - 1e-12 <= agreement(target_probs, draft_probs) <= 1 - tv + 1e-12


def test_equal_distributions_always_agree():
    """Drafter = target: acceptance is 1, not nearly 1."""
    target, _ = pair(9, 1.0)
    assert measured(target, target.clone()) == 1.0

"""What the sampled laws share: what a draft token was drawn from, and what a law makes of a block.

A law is a pure function of (target probabilities, draft, uniforms): it decides how many draft tokens stay and what the
next token is drawn from. The caller brings the noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.sampling.draws import Ids, Weights
from paceline.types import DraftDistribution


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A draft token and the distribution it was drawn from: ``probs`` [M] of the tokens ``support`` [M], 0 elsewhere.

    ``prob`` (above 0) is the token's own.
    """

    token_id: int
    support: Ids
    probs: Weights
    prob: float


@dataclass(frozen=True, slots=True)
class Ruling:
    """So many draft tokens stay; the token after them is to be drawn in proportion to ``weights`` [V] float64."""

    accepted: int
    weights: Weights


def draft_tokens(token_ids: Sequence[int], distributions: Sequence[DraftDistribution]) -> list[DraftToken]:
    """The draft as the laws read it. No distributions: guesses without a draw, each of probability 1.

    That is exact for whatever does not look at the noise of this round: such a guess is a function of the prefix.
    """
    if not distributions:
        certain = np.ones(1)
        return [DraftToken(token, np.array([token]), certain, 1.0) for token in token_ids]
    return [_drawn(token, distribution) for token, distribution in zip(token_ids, distributions, strict=True)]


def normalised(distribution: DraftDistribution) -> tuple[Ids, Weights]:
    """Tokens and probabilities, in float64: drafter and verifier both come to them from the numbers on the wire."""
    probs = np.array(distribution.probs, dtype=np.float64)
    return np.array(distribution.token_ids, dtype=np.int64), probs / probs.sum()


def residual(target_probs: Weights, token: DraftToken, scale: float = 1.0) -> Weights:
    """(scale * target - draft)+ [V]. Where nothing is left, the target: then a rejection is but rounding."""
    weights = target_probs * scale
    weights[token.support] -= token.probs
    np.maximum(weights, 0.0, out=weights)
    return weights if weights.any() else target_probs


def _drawn(token: int, distribution: DraftDistribution) -> DraftToken:
    support, probs = normalised(distribution)
    return DraftToken(token, support, probs, float(probs[distribution.token_ids.index(token)]))

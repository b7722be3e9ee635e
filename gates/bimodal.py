"""Do rounds come in two kinds, those that accept next to nothing and those that accept next to all? A test, not an eye.

A drafter with one acceptance gives accepted lengths that fall by a constant factor, and a pile at the end where blocks
end: two peaks to the eye, one kind of round. Two kinds show otherwise: the longer a block has been right, the likelier
it goes on. Tested is one geometric law, cut where blocks end, against a mixture of two, by the likelihood ratio; what the
ratio would be with one law is simulated (parametric bootstrap, McLachlan 1987), since no table holds for mixtures.
Acceptance that merely falls with position (the usual profile) makes the mixture no better: no false alarm from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Blocks = Mapping[tuple[int, bool], int]
"""(accepted tokens, whether the block ended there, all of it accepted): rounds."""

ALPHA = 0.001
"""False alarms: at most so many of the histograms of one kind of round."""
_REPLICATES = 999
_STEPS = 120
LEAST_SHARE, LEAST_DISTANCE = 0.1, 0.45
"""Two kinds are worth a word where each has such a share of the rounds, and their acceptance differs so much."""
FEWEST_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Shape:
    """What was found. ``kinds``: of both, share of the rounds and acceptance, the worse one first."""

    rounds: int
    all_rejected: float
    acceptance: float
    chance: float
    kinds: tuple[tuple[float, float], tuple[float, float]]

    @property
    def bimodal(self) -> bool:
        """Whether two kinds are called."""
        (low_share, low), (high_share, high) = self.kinds
        return (
            self.chance <= ALPHA
            and min(low_share, high_share) >= LEAST_SHARE
            and high - low >= LEAST_DISTANCE
        )

    @property
    def words(self) -> str:
        """The verdict with its figures."""
        (low_share, low), (high_share, high) = self.kinds
        if self.bimodal:
            return (
                f"bimodal: {low_share:.0%} of the rounds accept {low:.2f} of what they test, {high_share:.0%} accept "
                f"{high:.2f} (chance {self.chance:.3f} if there were one kind)"
            )
        return f"one kind of round, acceptance {self.acceptance:.2f} (a pile at the end is where blocks end)"


def shape_of(blocks: Blocks, *, seed: int = 1) -> Shape | None:
    """The verdict on accepted lengths; None where too few rounds were seen."""
    rounds = sum(blocks.values())
    if rounds < FEWEST_ROUNDS:
        return None
    longest = max(accepted for accepted, _ in blocks) + 1
    ended = np.zeros((1, longest + 1))  # all accepted, the block ended
    wrong = np.zeros((1, longest + 1))  # the next token was wrong
    for (accepted, whole), count in blocks.items():
        (ended if whole else wrong)[0, accepted] += count
    ratio, share, low, high = _likelihood_ratio(ended, wrong)
    accepted_tokens = float(((ended + wrong) * np.arange(longest + 1)).sum())
    acceptance = accepted_tokens / max(accepted_tokens + wrong.sum(), 1.0)
    chance = _chance(float(ratio[0]), acceptance, ended[0], wrong[0], seed)
    return Shape(
        rounds=rounds,
        all_rejected=float(wrong[0, 0]) / rounds,
        acceptance=acceptance,
        chance=chance,
        kinds=((1 - float(share[0]), float(low[0])), (float(share[0]), float(high[0]))),
    )


def _chance(seen: float, acceptance: float, ended: Floats, wrong: Floats, seed: int) -> float:
    """How often one law gives such a ratio: blocks end where they were seen to end, tokens are right at one rate."""
    if seen <= 0:
        return 1.0
    dice = np.random.default_rng(seed)
    at_risk = np.full(_REPLICATES, int(ended.sum() + wrong.sum()))
    alive = float(at_risk[0])
    new_ended, new_wrong = (np.zeros((_REPLICATES, len(ended))) for _ in range(2))
    for length in range(len(ended)):
        stops = ended[length] / alive if alive > 0 else 0.0
        new_ended[:, length] = dice.binomial(at_risk, min(1.0, stops))
        at_risk = at_risk - new_ended[:, length].astype(np.int64)
        new_wrong[:, length] = dice.binomial(at_risk, 1 - acceptance) if length < len(ended) - 1 else at_risk
        at_risk = at_risk - new_wrong[:, length].astype(np.int64)
        alive -= float(ended[length] + wrong[length])
    ratios = _likelihood_ratio(new_ended, new_wrong)[0]
    return (1 + int((ratios >= seen).sum())) / (_REPLICATES + 1)


def _likelihood_ratio(ended: Floats, wrong: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """[B] each: twice the log ratio of two laws over one, share of the better kind, both acceptances. EM, all rows at once."""
    lengths = np.arange(ended.shape[1])
    counts = ended + wrong
    rights, wrongs = (counts * lengths).sum(1), wrong.sum(1)
    rate = np.clip(rights / np.maximum(rights + wrongs, 1.0), 1e-4, 1 - 1e-4)
    alone = rights * np.log(rate) + wrongs * np.log1p(-rate)
    share, low, high = np.full(len(rate), 0.5), 0.4 * rate, 1 - 0.4 * (1 - rate)
    for _ in range(_STEPS):
        of_high_ended = share[:, None] * high[:, None] ** lengths
        of_low_ended = (1 - share)[:, None] * low[:, None] ** lengths
        of_high_wrong, of_low_wrong = of_high_ended * (1 - high)[:, None], of_low_ended * (1 - low)[:, None]
        high_ended = ended * of_high_ended / (of_high_ended + of_low_ended)
        high_wrong = wrong * of_high_wrong / (of_high_wrong + of_low_wrong)
        low_ended, low_wrong = ended - high_ended, wrong - high_wrong
        share = np.clip((high_ended + high_wrong).sum(1) / np.maximum(counts.sum(1), 1.0), 1e-4, 1 - 1e-4)
        high = _rate((high_ended + high_wrong) @ lengths, high_wrong.sum(1))
        low = _rate((low_ended + low_wrong) @ lengths, low_wrong.sum(1))
    of_ended = share[:, None] * high[:, None] ** lengths + (1 - share)[:, None] * low[:, None] ** lengths
    of_wrong = (share * (1 - high))[:, None] * high[:, None] ** lengths
    of_wrong += ((1 - share) * (1 - low))[:, None] * low[:, None] ** lengths
    both = (ended * np.log(of_ended) + wrong * np.log(of_wrong)).sum(1)
    return 2 * (both - alone), share, low, high


def _rate(rights: Floats, wrongs: Floats) -> Floats:
    return np.clip(rights / np.maximum(rights + wrongs, 1e-9), 1e-4, 1 - 1e-4)

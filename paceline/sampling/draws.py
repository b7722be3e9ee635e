"""Draws of the sampled laws: one uniform number, one token in proportion to weights. Keys come in, tokens come out."""

import numpy as np
import numpy.typing as npt

from paceline.sampling.noise import hash_counters, token_bits, token_counters

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]

_MASK63 = np.uint64((1 << 63) - 1)
_SCALE = 2.0**-63


def uniform(key: int) -> float:
    """A number in (0, 1], 1 with probability 2**-54: so ``uniform <= 1`` always holds and ``uniform <= 0`` never."""
    return (token_bits(key, 0) + 0.5) * _SCALE


def draw(weights: Weights, key: int, token_ids: Ids | None = None) -> int:
    """A token in proportion to ``weights`` [N]: the first arrival of exponential clocks, one a token.

    ``token_ids`` names the token of each weight; without it the weights are those of a whole vocabulary. At least one
    weight is above 0. Scaling all weights alike changes nothing.
    """
    possible = np.flatnonzero(weights > 0)
    tokens = possible if token_ids is None else token_ids[possible]
    with np.errstate(over="ignore"):  # beyond all numbers: it never comes
        arrivals = exponentials(key, tokens) / weights[possible]
    return int(tokens[arrivals.argmin()])


def exponentials(key: int, token_ids: Ids) -> Weights:
    """``noise.exponential`` of each token under one key, on the host."""
    counters = token_counters(token_ids)
    bits, scratch = np.empty((2, len(counters)), dtype=np.uint64)
    hash_counters(key, counters, out=bits, scratch=scratch)
    low = -np.log1p(-(bits.astype(np.float64) + 0.5) * _SCALE, where=bits < 1 << 62, out=np.zeros(len(bits)))
    high = -np.log(((_MASK63 - bits).astype(np.float64) + 0.5) * _SCALE)
    result: Weights = np.where(bits < 1 << 62, low, high)
    return result

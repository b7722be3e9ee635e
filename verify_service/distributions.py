"""Whether a proposal's distributions are such: a sampled law divides by them, so they are looked at before they count."""

import math
from collections.abc import Sequence
from enum import Enum

from paceline.types import DraftDistribution

SUM_TOLERANCE = 0.01
"""The numbers are divided by their sum anyway; one further off than rounding was not meant as a distribution."""


class Fault(Enum):
    """What is wrong with the distributions of a block. It costs that block, never the sequence."""

    COUNT = "count"  # not one for each token
    TOKENS = "tokens"  # none, twice the same, outside the vocabulary, or not as many as numbers
    NUMBERS = "numbers"  # not finite, or not above 0
    SUM = "sum"  # not 1
    ABSENT = "absent"  # the draft token is not among them


def fault_of(
    token_ids: Sequence[int], distributions: Sequence[DraftDistribution], vocab_size: int
) -> Fault | None:
    """The first fault of a block, None where it has none."""
    if len(distributions) != len(token_ids):
        return Fault.COUNT
    for token, distribution in zip(token_ids, distributions, strict=True):
        support = set(distribution.token_ids)
        if not support or not len(support) == len(distribution.token_ids) == len(distribution.probs):
            return Fault.TOKENS
        if min(support) < 0 or max(support) >= vocab_size:
            return Fault.TOKENS
        if not all(0.0 < prob < math.inf for prob in distribution.probs):
            return Fault.NUMBERS
        if abs(math.fsum(distribution.probs) - 1.0) > SUM_TOLERANCE:
            return Fault.SUM
        if token not in support:
            return Fault.ABSENT
    return None

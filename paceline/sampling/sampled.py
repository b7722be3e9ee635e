"""The sampled laws from logits to tokens: the drafter's draw, and the verifier's ruling with its keyed noise.

    draft       drafter   draw from the truncated q      key (seed, base, position, DRAFT)
    acceptance  verifier  one uniform a draft token      key (seed, base, position, ACCEPT)
    replacement verifier  the token that a block lacks   key (seed, position, REPLACE)
    bonus       verifier  the token behind a block       key (seed, position, BONUS)

``base`` is the round's base length, see ``block`` for why. A token without a block before it takes the bonus noise,
so it is a pure function of its position.
"""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.sampling.acceptance import DraftToken, Ruling, normalised
from paceline.sampling.block import block
from paceline.sampling.coupled import choose
from paceline.sampling.draws import draw, uniform
from paceline.sampling.noise import Domain, round_key, row_key
from paceline.sampling.processors import TokenRow, processed_logprobs
from paceline.sampling.ratio import ratio
from paceline.types import DraftDistribution, Law

_RULES = {Law.RATIO: ratio, Law.BLOCK: block}


def sample_draft(
    logits: torch.Tensor, rows: Sequence[TokenRow], base_lens: Sequence[int], top_m: int
) -> list[tuple[int, DraftDistribution]]:
    """A draft token for each row, drawn from its ``top_m`` likeliest tokens, and what it was drawn from.

    ``logits`` [R, V] float32; ``base_lens`` the lengths that the rows' rounds build on. The numbers are rounded to
    float32 before the draw, so that the verifier has exactly what was drawn from. Raises BadLogitsError.
    """
    drafted = []
    for row, logprobs, base_len in zip(rows, processed_logprobs(logits, rows), base_lens, strict=True):
        distribution = truncated(logprobs, top_m)
        token_ids, probs = normalised(distribution)
        key = round_key(row.params.seed, base_len, row.position, Domain.DRAFT)
        drafted.append((draw(probs, key, token_ids), distribution))
    return drafted


def truncated(logprobs: torch.Tensor, top_m: int) -> DraftDistribution:
    """The ``top_m`` likeliest tokens of one row [V] float64 that float32 can tell from impossible; at least one."""
    values, token_ids = logprobs.topk(min(top_m, len(logprobs)))
    probs = values.exp().cpu().numpy().astype(np.float32)
    kept = probs > 0
    return DraftDistribution(tuple(token_ids.cpu().numpy()[kept].tolist()), tuple(probs[kept].tolist()))


def decide(
    law: Law, logits: torch.Tensor, rows: Sequence[TokenRow], draft: Sequence[DraftToken]
) -> tuple[int, int]:
    """How many tokens of ``draft`` (K) stay, and the token after them.

    ``logits`` [K + 1, V] float32, one row for each of ``rows``; the first one's position is the round's base length.
    ``law`` is a sampled one. Raises BadLogitsError.
    """
    if not draft:
        return 0, choose(logits, rows, Domain.BONUS)[0]
    seed, base_len = rows[0].params.seed, rows[0].position
    uniforms = [
        uniform(round_key(seed, base_len, base_len + index, Domain.ACCEPT)) for index in range(len(draft))
    ]
    target_probs = [row.exp().cpu().numpy() for row in processed_logprobs(logits, rows)]
    ruling: Ruling = _RULES[law](target_probs, draft, uniforms)
    if ruling.accepted == len(draft):
        return ruling.accepted, choose(logits[len(draft) :], rows[len(draft) :], Domain.BONUS)[0]
    key = row_key(seed, base_len + ruling.accepted, Domain.REPLACE)
    return ruling.accepted, draw(ruling.weights, key)

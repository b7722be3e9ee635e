"""The coupled law: the token at a position is argmax_v(log p(v) + g(seed, position, v)), for target and drafter alike.

The draw is exact (Gumbel-max), and it is a pure function of logits, parameters, seed and position: nothing is carried
from step to step, and a row's token does not depend on the rows beside it. Agreement of target and drafter per
position is sum_j 1 / sum_i max(p_i / p_j, q_i / q_j) (Daliri, Musco, Suresh 2024).

How it is computed fast and exactly. argmax(log p + g) is argmin(E / w) with w = p / max p and E = exp(-g). Because
U < E = -log(1 - U), the cheap U / w is a lower bound of E / w: one float32 pass over the vocabulary finds its
smallest entry, whose true E / w then bounds the winner's, and the few tokens under that bound (usually one to five) are
compared in float64 on the host, with the host's logarithm. The float32 pass decides nothing.
"""

import math
from collections.abc import Sequence

import torch

from paceline.sampling.noise import Domain, exponential, noise_bits, row_key, row_keys
from paceline.sampling.processors import (
    SMALLEST_TEMPERATURE,
    TokenRow,
    kept_ids,
    penalise,
    refuse_bad_rows,
)
from paceline.sampling.scan import first_max, first_min, indices_at_most

# float32 rounding of the bound: exponentials of scaled logits, down to e**-87, are right within 2e-5.
_SLACK = 1.001


def choose(logits: torch.Tensor, rows: Sequence[TokenRow]) -> list[int]:
    """The coupled law's token for each row; at temperature 0 the largest processed logit, the lowest id among equals.

    ``logits`` [R, V] float32, one row for each of ``rows``. Raises BadLogitsError (an EngineError) naming the rows
    whose logits hold NaN or +inf, or nothing above -inf.
    """
    if not rows:
        return []
    processed = [penalise(logits[index], row) for index, row in enumerate(rows)]
    best = [first_max(row_logits[None])[0] for row_logits in processed]
    top = torch.stack([row_logits[token] for row_logits, token in zip(processed, best, strict=True)]).tolist()
    refuse_bad_rows(top)
    return [
        best[index] if row.params.greedy else _draw(processed[index], top[index], row)
        for index, row in enumerate(rows)
    ]


def top2_gap(logits: torch.Tensor) -> torch.Tensor:
    """Largest logit less the second largest: [R] float32; how near a greedy choice was to another one."""
    largest = torch.topk(logits, 2, dim=-1).values
    return largest[:, 0] - largest[:, 1]


def _draw(logits: torch.Tensor, top: float, row: TokenRow) -> int:
    params = row.params
    kept = kept_ids(logits, top, params)
    if kept is not None:
        logits = logits[kept]
    key = row_keys([row_key(params.seed, row.position, Domain.COUPLED)], logits.device)
    bits = noise_bits(key, logits.shape[-1] if kept is None else kept)[0]
    # (bits + 1/2) / weight: U / w without its scale of 2**-63.
    bound = torch.exp((logits - top) / max(params.temperature, SMALLEST_TEMPERATURE))
    torch.div(bits.float().add_(0.5), bound, out=bound)
    first = first_min(bound)
    ratio = exponential(int(bits[first])) / ((int(bits[first]) + 0.5) * 2.0**-63)
    candidates = indices_at_most(bound, float(bound[first]) * ratio * _SLACK)
    winner, best_score = -1, -math.inf
    for candidate, logit, drawn in zip(
        candidates.tolist(), logits[candidates].tolist(), bits[candidates].tolist(), strict=True
    ):
        score = (logit - top) / params.temperature - math.log(exponential(drawn))
        if score > best_score:
            winner, best_score = candidate, score
    return winner if kept is None else int(kept[winner])

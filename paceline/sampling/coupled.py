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

from paceline.sampling.noise import Domain, exponential, noise_bits, row_key, row_keys, token_bits
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

# So many tokens are drawn among one by one: hashing one costs a microsecond in Python, the tensor way 100 at least.
_FEW = 64


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
    key = row_key(params.seed, row.position, Domain.COUPLED)
    if kept is not None:
        logits = logits[kept]
    if len(logits) <= _FEW:
        token_ids = range(len(logits)) if kept is None else kept.tolist()
        bits = [token_bits(key, token) for token in token_ids]
    else:
        contenders, bits = _contenders(logits, top, params.temperature, key, kept)
        logits = logits[contenders]
        token_ids = (contenders if kept is None else kept[contenders]).tolist()
    winner, best_score = -1, -math.inf
    for token, logit, drawn in zip(token_ids, logits.tolist(), bits, strict=True):
        score = (logit - top) / params.temperature - math.log(exponential(drawn))
        if score > best_score:
            winner, best_score = token, score
    return winner


def _contenders(
    logits: torch.Tensor, top: float, temperature: float, key: int, token_ids: torch.Tensor | None
) -> tuple[torch.Tensor, list[int]]:
    """Indices into ``logits``, ascending, among which the winner is, and the noise bits of each."""
    keys = row_keys([key], logits.device)
    bits = noise_bits(keys, len(logits) if token_ids is None else token_ids)[0]
    # (bits + 1/2) / weight: U / w without its scale of 2**-63.
    bound = torch.exp((logits - top) / max(temperature, SMALLEST_TEMPERATURE))
    torch.div(bits.float().add_(0.5), bound, out=bound)
    first = first_min(bound)
    first_bits = int(bits[first])
    inflation = exponential(first_bits) / ((first_bits + 0.5) * 2.0**-63)  # E / U of that entry
    contenders = indices_at_most(bound, float(bound[first]) * inflation * _SLACK)
    return contenders, bits[contenders].tolist()

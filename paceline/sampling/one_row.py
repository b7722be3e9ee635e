"""The draw of one row: exactly, though most of the row is only estimated.

argmax(log p + g) is argmin(E / w) with w = p / max p and E = exp(-g). Because U < E = -log(1 - U), the cheap U / w is a lower bound
of E / w: one float32 pass over the vocabulary finds its smallest entry, whose true E / w then bounds the winner's, and the few tokens
under that bound (usually one to five) are compared in float64 on the host, with the host's logarithm. The float32 pass decides nothing.
Where there is a compiler all of that is one call (``contenders``), with the same comparison.
"""

import math

import numpy as np
import torch

from paceline.errors import EngineError
from paceline.sampling.contenders import (
    LAST,
    SLACK,
    Rank,
    can_pass,
    draw_among,
    draw_whole,
    has_compiled,
    masses,
)
from paceline.sampling.noise import Domain, exponential, row_key, token_bits
from paceline.sampling.processors import TokenRow, kept_ids
from paceline.sampling.scan import Floats, Ids, array, indices_at_most, ratio_bounds, smallest, take
from paceline.types import SamplingParams

# Of all mass: nearer to the edge of the nucleus than that, float64 decides. Ten times the rounding of ``masses``.
_MASS_SLACK = 1e-4

# So many tokens are drawn among one by one: hashing one costs a microsecond in plain Python.
_FEW = 64


def draw_row(logits: torch.Tensor, first: Rank, row: TokenRow, domain: Domain) -> int:
    """The token of one row of penalised logits; ``first`` is the likeliest one."""
    params, top = row.params, first.logit
    key = row_key(params.seed, row.position, domain)
    if not 0 < params.top_k < len(logits) and can_pass(logits):
        if params.top_p < 1.0:
            drawn = _from_nucleus(logits, first, params, key)
        else:
            drawn = _from_all(logits, top, params, key)
        if drawn is not None:
            return drawn
    kept = kept_ids(logits, top, params)
    if kept is not None:
        return draw_from(kept, take(logits, kept), top, params, key)
    token_ids = np.arange(len(logits)) if len(logits) <= _FEW else _contenders(logits, top, params, key, None)
    return winner_of(token_ids, take(logits, token_ids), top, params, key)


def draw_from(kept: Ids, values: Floats, top: float, params: SamplingParams, key: int) -> int:
    """The draw among the tokens that stay, with their logits."""
    if len(kept) > _FEW:
        contenders = _contenders(values, top, params, key, kept)
        kept, values = kept[contenders], values[contenders]
    return winner_of(kept, values, top, params, key)


def _from_nucleus(logits: torch.Tensor, first: Rank, params: SamplingParams, key: int) -> int | None:
    """The draw under top_p without the nucleus: the winner of all tokens if it belongs to it, else of those before it.

    Whether a token belongs is a sum over those that rank before it, which costs less than sorting what may be half a
    vocabulary. None where rounding might decide.
    """
    top = first.logit
    behind = LAST
    while True:
        token = draw_whole(logits, top, params.temperature, key, behind)
        if token is None or token == first.token_id:  # the likeliest one always belongs
            return token
        winner = Rank(float(array(logits)[token]), token)
        stays = belongs(winner, top, *masses(logits, top, params.temperature, winner), params)
        if stays is None:
            return None
        if stays:
            return token
        behind = winner


def belongs(
    winner: Rank, top: float, everything: float, before: float, params: SamplingParams
) -> bool | None:
    """Whether top_p and min_p let a token stay, ``before`` of all mass ranking before it; None where rounding might decide."""
    wanted = params.top_p * everything
    if params.top_p < 1.0 and abs(before - wanted) <= _MASS_SLACK * everything:
        return None
    heavy = params.min_p == 0.0 or _is_heavy(winner.logit, top, params)
    if heavy is None:
        return None
    return heavy and (params.top_p == 1.0 or before < wanted)


def _from_all(logits: torch.Tensor, top: float, params: SamplingParams, key: int) -> int | None:
    """The draw without top_p. None where min_p excludes the winner of all tokens, or rounding might decide."""
    token = draw_whole(logits, top, params.temperature, key)
    if token is None or params.min_p == 0.0:
        return token
    return token if _is_heavy(float(array(logits)[token]), top, params) else None


def _is_heavy(logit: float, top: float, params: SamplingParams) -> bool | None:
    """Whether min_p lets a token stay; None where rounding might decide."""
    weight = math.exp((logit - top) / params.temperature)
    if abs(weight - params.min_p) <= 1e-9 * weight:
        return None
    return weight >= params.min_p


def winner_of(token_ids: Ids, values: Floats, top: float, params: SamplingParams, key: int) -> int:
    """The token with the smallest E / w, the lowest id among equals."""
    if has_compiled():
        index = draw_among(token_ids, values, top, params.temperature, key)
        if index is not None:
            return int(token_ids[index])
    winner: int | None = None
    best_score = -math.inf
    for token, logit in zip(token_ids.tolist(), values.tolist(), strict=True):
        score = (logit - top) / params.temperature - math.log(exponential(token_bits(key, token)))
        if score > best_score:
            winner, best_score = token, score
    if winner is None:
        raise EngineError(f"no token can be drawn with {params}")
    return winner


def _contenders(
    values: torch.Tensor | Floats, top: float, params: SamplingParams, key: int, token_ids: Ids | None
) -> Ids:
    """Indices into ``values``, ascending, among which the winner is; ``token_ids`` names the tokens if not all."""
    bounds = ratio_bounds(values, top, params.temperature, key, token_ids)
    first, bound = smallest(bounds)
    bits = token_bits(key, first if token_ids is None else int(token_ids[first]))
    inflation = exponential(bits) / ((bits + 0.5) * 2.0**-63)  # E / U of that entry
    return indices_at_most(bounds, bound * inflation * SLACK)

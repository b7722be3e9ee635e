"""The coupled law: the token at a position is argmax_v(log p(v) + g(seed, position, v)), for target and drafter alike.

The draw is exact (Gumbel-max), and it is a pure function of logits, parameters, seed and position: nothing is carried
from step to step, and a row's token does not depend on the rows beside it. Agreement of target and drafter per
position is sum_j 1 / sum_i max(p_i / p_j, q_i / q_j) (Daliri, Musco, Suresh 2024).

How it is computed fast and exactly. argmax(log p + g) is argmin(E / w) with w = p / max p and E = exp(-g). Because
U < E = -log(1 - U), the cheap U / w is a lower bound of E / w: one float32 pass over the vocabulary finds its
smallest entry, whose true E / w then bounds the winner's, and the few tokens under that bound (usually one to five) are
compared in float64 on the host, with the host's logarithm. The float32 pass decides nothing. Where there is a compiler all of that is one
call (``contenders``), with the same comparison.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from paceline.errors import EngineError
from paceline.sampling import largest, scan
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
from paceline.sampling.device import leaders_together, masses_together, near_together
from paceline.sampling.noise import Domain, exponential, row_key, token_bits
from paceline.sampling.processors import (
    TokenRow,
    changes_logits,
    check_largest,
    kept_ids,
    largest_logits,
    narrowed,
    penalise,
)
from paceline.sampling.scan import Floats, Ids, array, indices_at_most, ratio_bounds, smallest, take
from paceline.types import SamplingParams

# Of all mass: nearer to the edge of the nucleus than that, float64 decides. Ten times the rounding of ``masses``.
_MASS_SLACK = 1e-4

# So many tokens are drawn among one by one: hashing one costs a microsecond in plain Python.
_FEW = 64


def choose(logits: torch.Tensor, rows: Sequence[TokenRow], domain: Domain = Domain.COUPLED) -> list[int]:
    """The coupled law's token for each row; at temperature 0 the largest processed logit, the lowest id among equals.

    ``logits`` [R, V] float32, one row for each of ``rows``. Raises BadLogitsError (an EngineError) naming the rows
    whose logits hold NaN or +inf, or nothing above -inf. ``domain``: whose noise the draw takes.
    """
    return list(map(_draws(logits, rows, domain), range(len(rows))))


def follow(
    logits: torch.Tensor, rows: Sequence[TokenRow], drafts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """For each draft the target's tokens, up to and with the first one that differs from it.

    As ``choose``; a draft of K tokens has K + 1 of the rows, one draft after the other. A draw reads the whole vocabulary, so rows
    behind the first difference are not drawn; that their logits are sound is looked at all the same.
    """
    draw = _draws(logits, rows, Domain.COUPLED)
    followed: list[list[int]] = []
    first = 0
    for draft in drafts:
        tokens = [draw(first)]
        for index, guess in enumerate(draft, first + 1):
            if tokens[-1] != guess:
                break
            tokens.append(draw(index))
        followed.append(tokens)
        first += len(draft) + 1
    return followed


def top2_gap(logits: torch.Tensor) -> torch.Tensor:
    """Largest logit less the second largest: [R] float32; how near a greedy choice was to another one."""
    two = torch.topk(logits, 2, dim=-1).values
    return two[:, 0] - two[:, 1]


def _draws(logits: torch.Tensor, rows: Sequence[TokenRow], domain: Domain) -> Callable[[int], int]:
    """The token of a row, by the row's index. Raises BadLogitsError for any of them."""
    known = largest.told(logits)
    if known is not None and not any(changes_logits(row.params) for row in rows):
        best, top = known
        check_largest(top)

        def draw_known(index: int) -> int:
            row = rows[index]
            if row.params.greedy:
                return best[index]
            return _draw(logits[index], Rank(top[index], best[index]), row, domain)

        return draw_known
    processed = [penalise(logits[index], row) for index, row in enumerate(rows)]
    found, highest = largest_logits(processed) if rows else ([], [])
    firsts = list(map(Rank, highest, found))
    together: dict[int, int] = {} if scan.on_host(logits) else _draw_together(processed, firsts, rows, domain)

    def draw(index: int) -> int:
        row = rows[index]
        if row.params.greedy:
            return found[index]
        token = together.get(index)
        return _draw(processed[index], firsts[index], row, domain) if token is None else token

    return draw


def _draw_together(
    processed: Sequence[torch.Tensor], firsts: Sequence[Rank], rows: Sequence[TokenRow], domain: Domain
) -> dict[int, int]:
    """Tokens of rows on a device, by the row's index, without those that are greedy or have to be looked at by themselves."""
    drawn: dict[int, int] = {}
    undecided: dict[int, Rank] = {}
    by_k: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row.params.greedy:
            continue
        if 0 < row.params.top_k < len(processed[index]):
            by_k.setdefault(row.params.top_k, []).append(index)
        else:
            undecided[index] = LAST
    keys = [row_key(row.params.seed, row.position, domain) for row in rows]
    for k, indices in by_k.items():
        leading = leaders_together(torch.stack([processed[index] for index in indices]), k)
        for index, found in zip(indices, leading, strict=True):
            if found is not None:
                params, top = rows[index].params, firsts[index].logit
                drawn[index] = _among(*narrowed(*found, top, params), top, params, keys[index])
    while undecided:
        indices = list(undecided)
        matrix = torch.stack([processed[index] for index in indices])
        tops = [firsts[index].logit for index in indices]
        temperatures = [rows[index].params.temperature for index in indices]
        before = [undecided[index] for index in indices]
        near = near_together(matrix, tops, temperatures, [keys[index] for index in indices], before)
        winners: dict[int, Rank] = {}  # by place in ``indices``
        for place, index in enumerate(indices):
            params, found = rows[index].params, near[place]
            if found is None:
                continue
            token = _winner(*found, tops[place], params, keys[index])
            if token == firsts[index].token_id or (params.top_p == 1.0 and params.min_p == 0.0):
                drawn[index] = token
            else:
                winners[place] = Rank(float(found[1][found[0] == token][0]), token)
        undecided = {}
        if not winners:
            break
        places = list(winners)
        masses_of = masses_together(
            matrix[places],
            [tops[place] for place in places],
            [temperatures[place] for place in places],
            list(winners.values()),
        )
        for place, (everything, heavier) in zip(places, masses_of, strict=True):
            index, winner = indices[place], winners[place]
            belongs = _belongs(winner, firsts[index].logit, everything, heavier, rows[index].params)
            if belongs:
                drawn[index] = winner.token_id
            elif belongs is not None:
                undecided[index] = winner
    return drawn


def _draw(logits: torch.Tensor, first: Rank, row: TokenRow, domain: Domain) -> int:
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
        return _among(kept, take(logits, kept), top, params, key)
    token_ids = np.arange(len(logits)) if len(logits) <= _FEW else _contenders(logits, top, params, key, None)
    return _winner(token_ids, take(logits, token_ids), top, params, key)


def _among(kept: Ids, values: Floats, top: float, params: SamplingParams, key: int) -> int:
    """The draw among the tokens that stay, with their logits."""
    if len(kept) > _FEW:
        contenders = _contenders(values, top, params, key, kept)
        kept, values = kept[contenders], values[contenders]
    return _winner(kept, values, top, params, key)


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
        belongs = _belongs(winner, top, *masses(logits, top, params.temperature, winner), params)
        if belongs is None:
            return None
        if belongs:
            return token
        behind = winner


def _belongs(
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


def _winner(token_ids: Ids, values: Floats, top: float, params: SamplingParams, key: int) -> int:
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

"""From a model's logits to the distribution a token is drawn from, row by row.

The order, which is part of the promise to users:

1. repetition penalty   every token of prompt and output: logit / r where it is positive, logit * r where negative
2. presence penalty     every token of the output: minus a constant, once
3. frequency penalty    every token of the output: minus a constant, once per appearance
4. logit bias           plus the bias of the token
5. temperature          logits / temperature; 0 puts all mass on the largest logit and skips the rest
6. top_k                the k largest logits
7. top_p                the smallest leading part, in falling order, of what is left that holds >= top_p of its mass
8. min_p                of what is left, tokens with at least min_p times the probability of the likeliest

Ties are broken towards the lower token id everywhere: in the largest logit, at the edge of top_k, in the falling order
of top_p. min_p is a threshold on the token itself and knows no ties. The likeliest token is never excluded.

Steps 1 to 4 are computed in float64 and stored as float32, so that every row goes on alike; from 5 on all that
decides is float64, except the total mass of top_p without top_k (float32 exponentials, summed in float64). Every row
is computed by itself: its result cannot depend on the other rows of the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import EngineError
from paceline.sampling.contenders import can_pass, leaders
from paceline.sampling.scan import Floats, Ids, indices_at_least, kth_largest, largest, mass, put, take
from paceline.types import SamplingParams

Weights = npt.NDArray[np.float64]


class BadLogitsError(EngineError):
    """The model gave logits that no token can be drawn from. ``rows`` are their indices; the other rows are fine."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(f"logits of rows {list(self.rows)} hold NaN or +inf, or nothing above -inf")


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row of logits: it predicts the token at absolute ``position``, after ``prompt`` and ``output``.

    ``output`` holds the draft prefix of that row too. Both are read only if ``params.needs_history``.
    """

    params: SamplingParams
    position: int
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()


def processed_logprobs(logits: torch.Tensor, rows: Sequence[TokenRow]) -> torch.Tensor:
    """Log-probabilities after all processors: [R, V] float64, -inf where excluded.

    ``logits`` [R, V] float32. Raises BadLogitsError.
    """
    result = torch.full(logits.shape, -math.inf, dtype=torch.float64, device=logits.device)
    if not rows:
        return result
    penalised = [penalise(logits[index], row) for index, row in enumerate(rows)]
    for index, (row, row_logits, best, top) in enumerate(
        zip(rows, penalised, *largest_logits(penalised), strict=True)
    ):
        if row.params.greedy:
            result[index, best] = 0.0
            continue
        kept = kept_ids(row_logits, top, row.params)
        index_of_kept = slice(None) if kept is None else torch.from_numpy(kept).to(logits.device)
        scaled = row_logits[index_of_kept].double().sub(top).div(row.params.temperature)
        result[index, index_of_kept] = scaled - torch.logsumexp(scaled, -1)
    return result


def changes_logits(params: SamplingParams) -> bool:
    """Whether steps 1 to 4 do anything."""
    return params.needs_history or bool(params.logit_bias)


def penalise(logits: torch.Tensor, row: TokenRow) -> torch.Tensor:
    """Steps 1 to 4 on one row: [V] float32, the same tensor if there is nothing to do."""
    params = row.params
    if not changes_logits(params):
        return logits
    vocab_size = len(logits)
    biased, bias = _biases(params, vocab_size)
    if not params.needs_history:
        return put(logits, biased, (take(logits, biased) + bias).astype(np.float32))
    repeated = np.zeros(vocab_size, dtype=np.bool_)
    output = _ids_below(vocab_size, row.output)
    appearances = np.bincount(output, minlength=vocab_size)
    if params.repetition_penalty != 1.0:
        repeated[output] = True
        repeated[_ids_below(vocab_size, row.prompt)] = True
    touched = repeated | (appearances > 0)
    touched[biased] = True
    ids = np.flatnonzero(touched)
    values = take(logits, ids).astype(np.float64)
    penalty = params.repetition_penalty
    values = np.where(repeated[ids], np.where(values > 0, values / penalty, values * penalty), values)
    values -= (appearances[ids] > 0) * params.presence_penalty + appearances[ids] * params.frequency_penalty
    values[np.searchsorted(ids, biased)] += bias
    return put(logits, ids, values.astype(np.float32))


def _biases(params: SamplingParams, vocab_size: int) -> tuple[Ids, Weights]:
    """Tokens with a bias, ascending, and the biases. Of a whole vocabulary: 10 ms, more than a step, so made once a request."""
    if not params.prepared:
        count = len(params.logit_bias)
        ids = np.fromiter(params.logit_bias, np.int64, count)
        bias = np.fromiter(params.logit_bias.values(), np.float64, count)
        order = np.argsort(ids)
        params.prepared.append((ids[order], bias[order]))
    ids, bias = params.prepared[0]
    within = int(np.searchsorted(ids, vocab_size))
    return ids[:within], bias[:within]


def _ids_below(vocab_size: int, token_ids: Sequence[int]) -> Ids:
    """Without ids beyond the head, which have no logit to change (heads may be padded differently)."""
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[ids < vocab_size]


def largest_logits(rows: Sequence[torch.Tensor]) -> tuple[list[int], list[float]]:
    """Token and value of each row's largest logit, the lowest id among equals; ``rows`` are R tensors [V] float32.

    Raises BadLogitsError where that value is not a finite number.
    """
    best, top = largest(rows)
    check_largest(top)
    return best, top


def check_largest(top: Sequence[float]) -> None:
    """Raises BadLogitsError where the largest logit of a row is not a finite number."""
    bad = [index for index, value in enumerate(top) if not math.isfinite(value)]
    if bad:
        raise BadLogitsError(bad)


def kept_ids(logits: torch.Tensor, top: float, params: SamplingParams) -> Ids | None:
    """Steps 6 to 8 on one row of penalised logits [V]: ascending ids that stay, on the host; None if all do.

    ``top`` is the row's largest logit. The temperature is above 0.
    """
    if 0 < params.top_k < len(logits):
        kept = _top_k(logits, params.top_k)
        return narrowed(kept, take(logits, kept), top, params)[0]
    if params.top_p < 1.0:
        kept = _top_p(logits, top, params)
    elif params.min_p > 0.0:
        kept = _not_below(logits, params.min_p, top, params)
    else:
        return None
    return _heavy(kept, take(logits, kept), top, params)[0]


def narrowed(kept: Ids, values: Floats, top: float, params: SamplingParams) -> tuple[Ids, Floats]:
    """Steps 7 and 8 on the tokens that top_k leaves, ascending, with their logits."""
    if params.top_p < 1.0:
        weights = _weights(values, top, params)
        leading = _leading_part(values, weights, params.top_p * float(weights.sum()))
        kept, values = kept[leading], values[leading]
    return _heavy(kept, values, top, params)


def _heavy(kept: Ids, values: Floats, top: float, params: SamplingParams) -> tuple[Ids, Floats]:
    if params.min_p == 0.0:
        return kept, values
    stays = _weights(values, top, params) >= params.min_p
    return kept[stays], values[stays]


def _top_k(logits: torch.Tensor, k: int) -> Ids:
    found = leaders(logits, k) if can_pass(logits) else None
    kept = indices_at_least(logits, kth_largest(logits, k)) if found is None else found
    if len(kept) <= k:
        return kept
    values = take(logits, kept)
    # More tokens sit on the edge than fit: the lowest ids among them stay.
    on_edge = np.flatnonzero(values == values.min())
    return np.delete(kept, on_edge[k - len(kept) :])


def _top_p(logits: torch.Tensor, top: float, params: SamplingParams) -> Ids:
    # Sorting the vocabulary costs ten times all the rest, and the tokens above a threshold usually hold mass enough.
    # Where they do not, the second threshold cannot fail: all tokens below it weigh less than what may go.
    total = mass(logits, top, params.temperature)
    wanted = params.top_p * total
    spare = (1.0 - params.top_p) * total
    for least_weight in (1e-3 * spare, 0.5 * spare / len(logits)):
        likely = _not_below(logits, min(least_weight, 1.0), top, params)
        values = take(logits, likely)
        weights = _weights(values, top, params)
        if float(weights.sum()) >= wanted:
            break
    return likely[_leading_part(values, weights, wanted)]


def _leading_part(values: Floats, weights: Weights, wanted: float) -> Ids:
    """Which entries, ascending, make the shortest part that weighs ``wanted``, taken in falling order of values."""
    order = np.argsort(-values, kind="stable")
    falling = weights[order]
    before = np.concatenate(([0.0], np.cumsum(falling)[:-1]))
    count = max(1, int(np.count_nonzero(before < wanted)))
    return np.sort(order[:count])


def _not_below(logits: torch.Tensor, weight: float, top: float, params: SamplingParams) -> Ids:
    """All tokens of at least that weight, and perhaps a few just under it."""
    edge = top + params.temperature * math.log(max(weight, 1e-300))
    return indices_at_least(logits, edge - 1e-5 * (1.0 + abs(edge)))


def _weights(values: Floats, top: float, params: SamplingParams) -> Weights:
    """Probabilities relative to the likeliest token's, float64."""
    with np.errstate(over="ignore", under="ignore"):
        weights: Weights = np.exp((values.astype(np.float64) - top) / params.temperature)
    return weights

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
from paceline.sampling.scan import first_max, indices_at_least
from paceline.types import SamplingParams


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
    penalised = [penalise(logits[index], row) for index, row in enumerate(rows)]
    largest = [largest_logit(row_logits) for row_logits in penalised]
    refuse_bad_rows([value for _, value in largest])
    for index, (row, row_logits, (best, top)) in enumerate(zip(rows, penalised, largest, strict=True)):
        if row.params.greedy:
            result[index, best] = 0.0
            continue
        kept = kept_ids(row_logits, top, row.params)
        scaled = (
            (row_logits if kept is None else row_logits[kept]).double().sub(top).div(row.params.temperature)
        )
        log_probs = scaled - torch.logsumexp(scaled, -1)
        if kept is None:
            result[index] = log_probs
        else:
            result[index, kept] = log_probs
    return result


def penalise(logits: torch.Tensor, row: TokenRow) -> torch.Tensor:
    """Steps 1 to 4 on one row: [V] float32, the same tensor if there is nothing to do."""
    params = row.params
    if not params.needs_history and not params.logit_bias:
        return logits
    vocab_size = len(logits)
    bias = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
    repeated = np.zeros(vocab_size, dtype=np.bool_)
    appearances = np.zeros(vocab_size, dtype=np.int64)
    if params.needs_history:
        output = _ids_below(vocab_size, row.output)
        appearances = np.bincount(output, minlength=vocab_size)
        if params.repetition_penalty != 1.0:
            repeated[output] = True
            repeated[_ids_below(vocab_size, row.prompt)] = True
    touched = repeated | (appearances > 0)
    touched[list(bias)] = True
    ids = np.flatnonzero(touched)
    index = torch.from_numpy(ids).to(logits.device)
    values = logits[index].double().cpu().numpy()
    penalty = params.repetition_penalty
    values = np.where(repeated[ids], np.where(values > 0, values / penalty, values * penalty), values)
    values -= (appearances[ids] > 0) * params.presence_penalty + appearances[ids] * params.frequency_penalty
    values += [bias.get(token, 0.0) for token in ids.tolist()] if bias else 0.0
    return logits.index_copy(0, index, torch.from_numpy(values).to(logits.device, torch.float32))


def _ids_below(vocab_size: int, token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """Without ids beyond the head, which have no logit to change (heads may be padded differently)."""
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[ids < vocab_size]


def largest_logit(logits: torch.Tensor) -> tuple[int, float]:
    """Token and value of a row's largest logit, the lowest id among equals; NaN if the row holds one."""
    best = first_max(logits[None])[0]
    return best, float(logits[best])


def refuse_bad_rows(largest: Sequence[float]) -> None:
    """Raises BadLogitsError if any row's largest logit is not a finite number."""
    bad = [index for index, value in enumerate(largest) if not math.isfinite(value)]
    if bad:
        raise BadLogitsError(bad)


def kept_ids(logits: torch.Tensor, top: float, params: SamplingParams) -> torch.Tensor | None:
    """Steps 6 to 8 on one row of penalised logits: ascending ids that stay, int64; None if all do.

    ``top`` is the row's largest logit. The temperature is above 0.
    """
    kept: torch.Tensor | None = None
    if 0 < params.top_k < logits.shape[-1]:
        kept = _top_k(logits, params.top_k)
    if params.top_p < 1.0:
        kept = _top_p(logits, kept, top, params)
    if params.min_p > 0.0:
        kept = _min_p(logits, kept, top, params)
    return kept


def _top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    edge = float(torch.topk(logits, k).values[-1])
    kept = indices_at_least(logits, edge)
    if len(kept) == k:
        return kept
    # More tokens sit on the edge than fit: the lowest ids among them stay.
    on_edge = logits[kept] == edge
    surplus = len(kept) - k
    drop = on_edge.nonzero().squeeze(-1)[-surplus:]
    stays = torch.ones_like(on_edge)
    stays[drop] = False
    return kept[stays]


def _top_p(
    logits: torch.Tensor, kept: torch.Tensor | None, top: float, params: SamplingParams
) -> torch.Tensor:
    if kept is not None:
        weights = _weights(logits[kept], top, params)
        return _leading_part(logits, kept, weights, params.top_p * float(weights.sum()))
    # Sorting the vocabulary costs ten times all the rest, and what the threshold leaves usually holds enough mass.
    # Where it does not, the next one cannot fail: all tokens below it together weigh less than what may go.
    rough = torch.exp((logits - top) / max(params.temperature, SMALLEST_TEMPERATURE))
    total = float(rough.sum(dtype=torch.float64))
    wanted = params.top_p * total
    spare = (1.0 - params.top_p) * total
    for threshold in (1e-3 * spare, 0.5 * spare / logits.shape[-1]):
        candidates = indices_at_least(rough, min(threshold, 1.0))
        weights = _weights(logits[candidates], top, params)
        if float(weights.sum()) >= wanted:
            break
    return _leading_part(logits, candidates, weights, wanted)


def _leading_part(
    logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, wanted: float
) -> torch.Tensor:
    """The shortest prefix of ``ids``, in falling order of logits, that weighs at least ``wanted``; ascending."""
    order = torch.sort(logits[ids], descending=True, stable=True).indices
    falling = weights[order]
    before = torch.cumsum(falling, -1) - falling
    count = max(1, int((before < wanted).sum()))
    return torch.sort(ids[order[:count]]).values


def _min_p(
    logits: torch.Tensor, kept: torch.Tensor | None, top: float, params: SamplingParams
) -> torch.Tensor:
    if kept is None:
        rough_edge = top + params.temperature * math.log(params.min_p)
        kept = indices_at_least(logits, rough_edge - 1e-4 * (1.0 + abs(rough_edge)))
    scaled = logits[kept].double().sub(top).div(params.temperature)
    return kept[scaled >= math.log(params.min_p)]


def _weights(logits: torch.Tensor, top: float, params: SamplingParams) -> torch.Tensor:
    """Probabilities relative to the likeliest token's, float64."""
    return logits.double().sub(top).div(params.temperature).exp()


# Below it float32 division by the temperature would make 0 / 0; every difference between logits is out of reach there.
SMALLEST_TEMPERATURE = 1e-30

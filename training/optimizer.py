"""AdamW with a rate of its own for the head, and a running average of all weights."""

from collections.abc import Iterable

import torch

from training.drafter_model import DrafterModel


class Average:
    """Exponential moving average of a model's parameters."""

    def __init__(self, model: DrafterModel, horizon: float) -> None:
        self.horizon = horizon
        self.steps = 0
        self.weights = {name: param.detach().clone() for name, param in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: DrafterModel) -> None:
        """After an optimiser's step. The first steps count less, so that the start is forgotten soon."""
        self.steps += 1
        share = max(1 / self.horizon, 1 / (self.steps + 1))
        for name, param in model.named_parameters():
            self.weights[name].lerp_(param, share)


def make_optimizer(model: DrafterModel, *, lr: float, head_lr: float, decay: float) -> torch.optim.AdamW:
    """``peak`` of each of its groups is the full rate."""
    layers = [param for layer in model.layers for param in layer.parameters()]
    groups = [
        {"params": [param for param in layers if param.ndim == 2], "lr": lr, "peak": lr},
        {"params": [model.head], "lr": head_lr, "peak": head_lr},
        {
            "params": [model.final_norm, *(param for param in layers if param.ndim != 2)],
            "lr": head_lr,
            "peak": head_lr,
            "weight_decay": 0.0,
        },
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=decay, fused=True)


def restore(optimizer: torch.optim.Optimizer, state: dict[str, object]) -> None:
    """Take a saved state; rates and decay stay those that were asked for."""
    asked = [(group["peak"], group["weight_decay"]) for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, (peak, decay) in zip(optimizer.param_groups, asked, strict=True):
        group["peak"], group["weight_decay"] = peak, decay


def set_rates(groups: Iterable[dict[str, float]], factor: float) -> None:
    """Every group's rate at ``factor`` of its peak."""
    for group in groups:
        group["lr"] = factor * group["peak"]

"""AdamW for head and norms, Muon for the layers' matrices, and a running average of all weights.

Muon (K. Jordan and others, 2024) steps along the nearest semi-orthogonal matrix of the momentum. It learns more from a
step; on one slow core, where a batch is small, its iteration costs a third of the time and AdamW wins by the clock.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from training.drafter_model import DrafterModel

_POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
)
"""The first three of "The Polar Express" (N. Amsel and others, 2025)."""


@torch.no_grad()
def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest semi-orthogonal matrix."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (1.01 * x.norm() + 1e-7)
    for a, b, c in _POLYNOMIALS:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal; the step's size is that of AdamW (root mean square 0.2 of the rate)."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, *, momentum: float, decay: float
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of all parameters with a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                moment = state.setdefault("moment", torch.zeros_like(param))
                moment.mul_(group["momentum"]).add_(param.grad)
                update = orthogonal(param.grad + group["momentum"] * moment)
                param.mul_(1 - group["lr"] * group["decay"])
                param.add_(update, alpha=-group["lr"] * 0.2 * max(param.shape) ** 0.5)


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


def optimizers(model: DrafterModel, *, kind: str, lr: float, head_lr: float) -> list[torch.optim.Optimizer]:
    """For the layers' matrices and for the rest; ``peak`` of each group is its full rate."""
    found = _optimizers(model, kind, lr, head_lr)
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def restore(found: Sequence[torch.optim.Optimizer], states: Sequence[dict[str, Any]]) -> None:
    """Take saved states; the rates stay those that were asked for."""
    for optimizer, state in zip(found, states, strict=True):
        peaks = [group["peak"] for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["peak"] = peak


def _optimizers(model: DrafterModel, kind: str, lr: float, head_lr: float) -> list[torch.optim.Optimizer]:
    matrices = [param for layer in model.layers for param in layer.parameters() if param.ndim == 2]
    rest = [param for layer in model.layers for param in layer.parameters() if param.ndim != 2]
    rest.append(model.final_norm)
    adam = [{"params": [model.head], "lr": head_lr}, {"params": rest, "lr": head_lr, "weight_decay": 0.0}]
    if kind == "muon":
        return [
            Muon(matrices, lr, momentum=0.95, decay=0.01),
            torch.optim.AdamW(adam, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
        ]
    return [
        torch.optim.AdamW(
            [{"params": matrices, "lr": lr}, *adam], betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
    ]


def set_rates(found: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Every group's rate at ``factor`` of its peak."""
    for optimizer in found:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak"]

"""Divergence of the drafter from the target over the head's vocabulary, the head's product included.

Loss and gradients come in one pass over blocks of rows, so that the logits of a batch never exist at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Targets:
    """What the target would say at N positions, over the head's own indices."""

    index: torch.Tensor
    """[N, M] index in the head's vocabulary; -1 where the token is outside."""
    probs: torch.Tensor
    """[N, M] probability, renormalised over what is inside; 0 outside."""
    weight: torch.Tensor
    """[N] 0 where the target's likely tokens are all outside."""


class HeadLoss(torch.autograd.Function):
    """``share_tv`` of total variation, the rest forward KL (as cross-entropy), and the mean over positions."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, targets: Targets, share_tv: float
    ) -> torch.Tensor:
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head)
        total = hidden.new_zeros(())
        count = targets.weight.sum().clamp(min=1)
        for at in range(0, len(hidden), _BLOCK):
            rows = slice(at, at + _BLOCK)
            h, weight = hidden[rows], targets.weight[rows, None] / count
            inside = targets.index[rows] >= 0
            index, wanted = targets.index[rows].clamp(min=0), targets.probs[rows]
            logits = h @ head.T
            logprobs = logits.log_softmax(dim=-1)
            picked = logprobs.gather(1, index)
            q = logprobs.exp_()
            loss = -(1 - share_tv) * (wanted * picked).sum(1, keepdim=True)
            if share_tv:
                own = picked.exp()
                below = (own < wanted) & inside
                loss += share_tv * (1 - torch.minimum(own, wanted).sum(1, keepdim=True))
                mass = (own * below).sum(1, keepdim=True)
                change = -(1 - share_tv) * wanted - share_tv * own * below
                q.mul_((1 - share_tv) + share_tv * mass)
            else:
                change = -wanted
            total += (loss * weight).sum()
            q.scatter_add_(1, index, change * inside)
            q.mul_(weight)
            torch.mm(q, head, out=grad_hidden[rows])
            grad_head.addmm_(q.T, h)
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad * grad_hidden, grad * grad_head, None, None


@torch.no_grad()
def targets_of(
    top_ids: Sequence[torch.Tensor], top_logprobs: Sequence[torch.Tensor], index_of: torch.Tensor, hard: float
) -> Targets:
    """``index_of`` [V] maps a token id to the head's index or -1; ``hard`` is the share of the likeliest token alone."""
    index = index_of[torch.cat(list(top_ids))]
    probs = torch.cat(list(top_logprobs)).exp() * (index >= 0)
    mass = probs.sum(1, keepdim=True)
    probs /= mass.clamp(min=1e-6)
    weight = (mass[:, 0] > 0.05).float()
    if hard:
        first = torch.zeros_like(probs)
        first[:, 0] = (index[:, 0] >= 0).float()
        has = first.sum(1, keepdim=True)
        probs = probs * (1 - hard * has) + hard * first
    return Targets(index, probs * weight[:, None], weight)

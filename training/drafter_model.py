"""The drafter while it trains: a few Llama-shaped layers over packed sequences, and a head over fewer tokens.

Written out in torch operations, because what is special is what it leaves out. Rows that predict no answer token (the
prompt, but for its last token) are context: no gradient flows through their way up, only into the keys and values
they offer, and in the last layer they are keys and values alone. That saves a third of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import nn

from paceline.engine.lean_weights import Checkpoint, LayerWeights, Shape, join


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of several sequences, one sequence after the other."""

    ids: torch.Tensor
    positions: torch.Tensor
    counts: Sequence[int]
    """Rows of each sequence."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed sequences: the rows before the prompt's last token, and those that predict an answer token."""

    context: Rows
    answers: Rows


Rotation = tuple[torch.Tensor, torch.Tensor]


class Layer(nn.Module):
    """One decoder layer with joined projections."""

    def __init__(self, shape: Shape, *, bias: bool, head_norms: bool) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = 0.0
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden))
        self.query = nn.Linear(shape.hidden, queries, bias=bias)
        self.key_value = nn.Linear(shape.hidden, 2 * keys, bias=bias)
        self.query_norm = nn.Parameter(torch.ones(shape.head_size)) if head_norms else None
        self.key_norm = nn.Parameter(torch.ones(shape.head_size)) if head_norms else None
        self.attention_out = nn.Linear(queries, shape.hidden, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(shape.hidden))
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    @torch.no_grad()
    def load(self, weights: LayerWeights) -> None:
        """Take the weights of a layer of the target."""

        def copy(to: nn.Linear, *parts: Any) -> None:
            joined = join(list(parts), torch.float32)
            to.weight.copy_(joined.weight)
            if to.bias is not None and joined.bias is not None:
                to.bias.copy_(joined.bias)

        self.attention_norm.copy_(weights.attention_norm)
        self.mlp_norm.copy_(weights.mlp_norm)
        for own, theirs in ((self.query_norm, weights.query_norm), (self.key_norm, weights.key_norm)):
            if own is not None and theirs is not None:
                own.copy_(theirs)
        copy(self.query, weights.query)
        copy(self.key_value, weights.key, weights.value)
        copy(self.attention_out, weights.attention_out)
        copy(self.gate_up, weights.gate, weights.up)
        copy(self.down, weights.down)

    def forward(
        self,
        context: torch.Tensor,
        x: torch.Tensor,
        batch: Batch,
        rotations: tuple[Rotation, Rotation],
        *,
        last: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both kinds of rows one layer up: [P, hidden] (without gradient; unchanged where it is the ``last``), [N, hidden]."""
        below = norm(context, self.attention_norm, self.shape.epsilon)
        h = norm(x, self.attention_norm, self.shape.epsilon)
        old, new = self._key_value(below, rotations[0]), self._key_value(h, rotations[1])
        counts = batch.context.counts, batch.answers.counts
        x = self._up(x, _attend(self._query(h, rotations[1]), old, new, *counts))
        if not last:
            with torch.no_grad():
                query = self._query(below, rotations[0])
                context = self._up(context, _attend(query, None, old, [0] * len(counts[0]), counts[0]))
        return context, x

    def _key_value(self, h: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        both = self.key_value(h).view(len(h), 2 * shape.kv_heads, shape.head_size)
        key, value = both.split(shape.kv_heads, dim=1)
        if self.key_norm is not None:
            key = norm(key, self.key_norm, shape.epsilon)
        return _rotate(key, rotation), value

    def _query(self, h: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        query = self.query(h).view(len(h), self.shape.heads, self.shape.head_size)
        if self.query_norm is not None:
            query = norm(query, self.query_norm, self.shape.epsilon)
        return _rotate(query, rotation)

    def _up(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self._dropped(self.attention_out(attended.flatten(1)))
        gate, up = self.gate_up(norm(x, self.mlp_norm, self.shape.epsilon)).chunk(2, dim=1)
        return x + self._dropped(self.down(F.silu(gate) * up))

    def _dropped(self, branch: torch.Tensor) -> torch.Tensor:
        """Dropout while training: answers are few and are read several times."""
        return F.dropout(branch, self.dropout, self.training) if self.dropout else branch


class DrafterModel(nn.Module):
    """Layers, final norm and head. The embedding is the target's own and never changes."""

    def __init__(
        self,
        shape: Shape,
        embedding: torch.Tensor,
        vocab_ids: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        *,
        bias: bool = False,
        head_norms: bool = False,
    ) -> None:
        """``shape.layers`` layers; ``vocab_ids`` [V'] are the target's ids that the head knows."""
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(
            Layer(shape, bias=bias, head_norms=head_norms) for _ in range(shape.layers)
        )
        self.final_norm = nn.Parameter(torch.ones(shape.hidden))
        self.head = nn.Parameter(torch.zeros(len(vocab_ids), shape.hidden))
        self.embedding: torch.Tensor
        self.vocab_ids: torch.Tensor
        self.cosines: torch.Tensor
        self.sines: torch.Tensor
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("vocab_ids", vocab_ids)
        self.register_buffer("cosines", torch.cat((rope[0], rope[0]), dim=1), persistent=False)
        self.register_buffer("sines", torch.cat((rope[1], rope[1]), dim=1), persistent=False)

    def forward(self, batch: Batch) -> torch.Tensor:
        """[N, hidden] after the final norm: what the head multiplies."""
        rotations = self._rotation(batch.context), self._rotation(batch.answers)
        context, x = (self.embedding[rows.ids].float() for rows in (batch.context, batch.answers))
        for index, layer in enumerate(self.layers):
            context, x = layer(context, x, batch, rotations, last=index == len(self.layers) - 1)
        return norm(x, self.final_norm, self.shape.epsilon)

    def load_layers(self, checkpoint: Checkpoint, shape: Shape, chosen: Sequence[int]) -> None:
        """Start from the target's layers ``chosen``; ``shape`` is the target's."""
        for index, weights in enumerate(checkpoint.layers(shape)):
            for layer, theirs in zip(self.layers, chosen, strict=True):
                if theirs == index:
                    layer.load(weights)  # type: ignore[operator]

    def _rotation(self, rows: Rows) -> Rotation:
        return self.cosines[rows.positions].unsqueeze(1), self.sines[rows.positions].unsqueeze(1)


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def _rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cosines, sines = rotation
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-high, low), dim=-1) * sines


def _attend(
    query: torch.Tensor,
    old: tuple[torch.Tensor, torch.Tensor] | None,
    new: tuple[torch.Tensor, torch.Tensor],
    num_old: Sequence[int],
    num_new: Sequence[int],
) -> torch.Tensor:
    """Causal attention, each sequence for itself: row i of ``query`` [rows, heads, D] sees all old rows and new ones to i."""
    groups = query.shape[1] // new[0].shape[1]
    found = []
    old_at = at = 0
    for before, rows in zip(num_old, num_new, strict=True):
        if rows:
            both = [part[at : at + rows] for part in new]
            if before and old is not None:
                both = [
                    torch.cat((part[old_at : old_at + before], own))
                    for part, own in zip(old, both, strict=True)
                ]
            key, value = (part.repeat_interleave(groups, dim=1).transpose(0, 1).unsqueeze(0) for part in both)
            mask = None
            if before:
                mask = torch.ones(rows, before + rows, dtype=torch.bool, device=query.device).tril(before)
            one = query[at : at + rows].transpose(0, 1).unsqueeze(0)
            out = F.scaled_dot_product_attention(one, key, value, attn_mask=mask, is_causal=mask is None)
            found.append(out.squeeze(0).transpose(0, 1))
        old_at, at = old_at + before, at + rows
    return torch.cat(found) if found else query

"""The lean forward in torch operations: any device, any precision, no compiler; the yardstick of the native kernels.

On CUDA it has been written, not run: there was no device at hand. Nothing in it is specific to one; the attention is
that of the packed batch, and CUDA graphs are left for when they can be measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)

from paceline.engine.attention import Masks, PackedStep
from paceline.engine.kv import SlotKV
from paceline.engine.lean_weights import Checkpoint, Projection, Shape, join
from paceline.engine.linear import PackedLinear, can_pack
from paceline.engine.packing import Segment, pack

Apply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Apply
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_out: Apply
    mlp_norm: torch.Tensor
    gate_up: Apply
    down: Apply


class TorchBody:
    """The weights of one model and its forward over a packed batch."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shape: Shape,
        vocab_size: int,
        rope: tuple[torch.Tensor, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises Unsuitable for weights that are missing or too many."""
        self._shape = shape
        self._vocab_size = vocab_size
        self._device = device
        self._dtype = dtype
        self.precision = str(dtype).removeprefix("torch.")
        self.kv_dtype = dtype
        packs = can_pack(device, dtype)
        self.kernels = "torch operations, " + ("linears packed for oneDNN" if packs else f"on {device.type}")

        def tensor(weight: torch.Tensor) -> torch.Tensor:
            return weight.to(device=device, dtype=dtype, copy=True)

        def optional(weight: torch.Tensor | None) -> torch.Tensor | None:
            return None if weight is None else tensor(weight)

        def linear(*parts: Projection) -> Apply:
            joined = join(list(parts), dtype)
            if packs:
                return PackedLinear(joined.weight, joined.bias)
            weight = joined.weight.to(device)
            bias = None if joined.bias is None else joined.bias.to(device)
            return lambda rows: F.linear(rows, weight, bias)

        self._layers = [
            _Layer(
                attention_norm=tensor(layer.attention_norm),
                qkv=linear(layer.query, layer.key, layer.value),
                query_norm=optional(layer.query_norm),
                key_norm=optional(layer.key_norm),
                attention_out=linear(layer.attention_out),
                mlp_norm=tensor(layer.mlp_norm),
                gate_up=linear(layer.gate, layer.up),
                down=linear(layer.down),
            )
            for layer in checkpoint.layers(shape)
        ]
        self._final_norm = tensor(checkpoint.final_norm(shape.hidden))
        self._embedding = tensor(checkpoint.embedding(vocab_size, shape.hidden))
        self._head = linear(Projection(checkpoint.head(shape, vocab_size), None))
        # transformers rounds the table, not the angles, to the precision of the model.
        self._cosines, self._sines = (torch.cat((half, half), dim=1).to(device, dtype) for half in rope)
        self._masks = Masks(len(self._cosines), dtype, device)

    def forward(self, segments: Sequence[Segment], kv: SlotKV, layers: int) -> torch.Tensor:
        """Logits [sum of num_logits, V] after the first ``layers`` layers; writes the KV rows, moves no length."""
        batch = pack(segments, kv, self._device)
        shape, size = self._shape, self._shape.head_size
        rows = batch.token_ids.shape[1]
        positions = batch.position_ids[0]
        cosines, sines = self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)
        step = PackedStep(batch, kv, self._masks)
        x = self._embedding[batch.token_ids[0]]
        for index, layer in enumerate(self._layers[:layers]):
            qkv = layer.qkv(self._norm(x, layer.attention_norm)).view(rows, -1, size)
            query, key, value = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
            if layer.query_norm is not None:
                query = self._norm(query, layer.query_norm)
            if layer.key_norm is not None:
                key = self._norm(key, layer.key_norm)
            query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)
            attended = step.attend(
                index,
                query.transpose(0, 1).unsqueeze(0),
                key.transpose(0, 1).unsqueeze(0),
                value.transpose(0, 1).unsqueeze(0),
                size**-0.5,
                0,
            )
            x = x + layer.attention_out(attended.reshape(rows, -1))
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=1)
            x = x + layer.down(F.silu(gate) * up)
        if batch.num_logits == 0:
            return torch.empty(0, self._vocab_size, device=self._device)
        return self._head(self._norm(x[batch.logit_rows], self._final_norm))[: batch.num_logits]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._shape.epsilon)
        return weight * (wide * scale).to(self._dtype)


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-high, low), dim=-1) * sines

"""Numbers as quantised files hold them, in float32, and models made of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

BLOCK = 32
"""Inputs that share a scale."""

_Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Blocks:
    """value = scale * steps + minimum; steps [outputs, blocks, 32] whole numbers, the others [outputs, blocks, 1]."""

    scale: _Floats
    minimum: _Floats
    steps: _Floats

    @property
    def weight(self) -> torch.Tensor:
        """[outputs, inputs] float32, rounded once, as a fused multiply-add does."""
        values = self.scale.astype(np.float64) * self.steps + self.minimum
        return torch.from_numpy(values.astype(np.float32).reshape(len(values), -1))


def four_bit(weight: torch.Tensor) -> Blocks:
    """``weight`` [outputs, inputs] rounded to what Q4_1 can say: 16 steps of a float16 scale from a float16 minimum."""
    blocks = _cut(weight)
    low, high = blocks.min(axis=2, keepdims=True), blocks.max(axis=2, keepdims=True)
    minimum = _half(low)
    scale = _half((high - minimum) / np.float32(15))
    return Blocks(scale, minimum, np.clip(np.rint(_divided(blocks - minimum, scale)), 0, 15))


def eight_bit(weight: torch.Tensor) -> Blocks:
    """``weight`` [outputs, inputs] rounded to what Q8_0 can say: -127 to 127 steps of a float16 scale."""
    blocks = _cut(weight)
    scale = _half(np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127))
    return Blocks(scale, np.zeros_like(scale), np.clip(np.rint(_divided(blocks, scale)), -127, 127))


def quantise_model(path: Path, rounded: Callable[[torch.Tensor], Blocks]) -> Path:
    """Put every matrix of the model in ``path`` through ``rounded``."""
    weights = safetensors.torch.load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            weights[name] = rounded(weight).weight
    safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _cut(weight: torch.Tensor) -> _Floats:
    outputs, inputs = weight.shape
    cut: _Floats = weight.float().numpy().reshape(outputs, inputs // BLOCK, BLOCK)
    return cut


def _half(values: _Floats) -> _Floats:
    return values.astype(np.float16).astype(np.float32)


def _divided(values: _Floats, by: _Floats) -> _Floats:
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)

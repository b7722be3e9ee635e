"""Weights in blocks of 32 inputs: 4 bits with a scale and a minimum, or 8 bits with a scale, as GGUF's Q4_1 and Q8_0.

What comes back is float32 that the native kernels recognise and keep in the same few bits, number for number.
"""

from collections.abc import Callable

import torch

BLOCK = 32
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a block's range that are tried: what is clipped at the edge can be less than what is gained inside."""


def quantise_4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """``weight`` [out, in] as {"q4": uint8 [out, in / 2], "scale", "minimum": float16 [out, in / 32]}.

    Each block takes the range with the least squared error among a few. Low halves of the bytes are even inputs.
    """
    blocks = weight.float().reshape(len(weight), -1, BLOCK)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    kept = [torch.zeros_like(blocks), torch.zeros_like(low), torch.zeros_like(low)]
    for below in _SHRINKS:
        for above in _SHRINKS:
            middle = (low + high) / 2
            # The lowest number of a block is its minimum and the highest 15 scales above: so the kernels find them.
            minimum = (middle + (low - middle) * below).half().float()
            scale = ((middle + (high - middle) * above - minimum) / 15).half().float()
            q = ((blocks - minimum) / scale.clamp(min=1e-12)).round().clamp(0, 15)
            error = (q * scale + minimum - blocks).square().sum(-1, keepdim=True)
            better = error < best
            best = torch.where(better, error, best)
            kept = [torch.where(better, new, old) for new, old in zip((q, scale, minimum), kept, strict=True)]
    q, scale, minimum = kept
    whole = q.to(torch.uint8).reshape(weight.shape)
    return {
        "q4": whole[:, 0::2] | (whole[:, 1::2] << 4),
        "scale": scale.squeeze(-1).half(),
        "minimum": minimum.squeeze(-1).half(),
    }


def quantise_8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """``weight`` [out, in] as {"q8": int8 [out, in], "scale": float16 [out, in / 32]}."""
    blocks = weight.float().reshape(len(weight), -1, BLOCK)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
    q = (blocks / scale.clamp(min=1e-12)).round().clamp(-127, 127)
    return {"q8": q.to(torch.int8).reshape(weight.shape), "scale": scale.squeeze(-1).half()}


def restore(get: Callable[[str], torch.Tensor], kinds: set[str]) -> torch.Tensor:
    """The float32 weight; ``get`` gives a part by its name, ``kinds`` are the parts there are."""
    # In float64 the product and the sum are exact, so float32 is rounded to once, as in the kernels.
    scale = get("scale").double().repeat_interleave(BLOCK, dim=1)
    if "q8" in kinds:
        return (get("q8").double() * scale).float()
    packed = get("q4")
    q = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(len(packed), -1)
    return (q.double() * scale + get("minimum").double().repeat_interleave(BLOCK, dim=1)).float()

"""Linear layers of a CPU packed once for oneDNN, whose rows do not depend on how many rows there are.

The ordinary fp32 path (MKL) picks a kernel by the number of rows: one row and five rows differ in the last bit, and
two to nine rows cost up to twice what one costs. Packed, a row has the same bits for any number of rows from two up,
and five rows cost what two cost. So callers give at least two rows.
"""

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

_ROWS_HINT = (
    16  # no measurable influence on speed, but one value, so that the packed layout is always the same
)


class PackedLinear(torch.nn.Module):
    """y = x W^T + b over a weight in oneDNN's own layout. Not trainable, not movable."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight``: [out, in] on the CPU; the caller may drop it afterwards."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return result


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every linear layer of ``model`` by its packed form, freeing the originals; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = _packed(child)
            if packed is not None:
                setattr(parent, name, packed)
                count += 1
    return count


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build and device have the packed kernels for weights of ``dtype``."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(_ops(), "_linear_pointwise"):
        return False
    # oneDNN has bfloat16 from some of AVX-512 on; elsewhere packing raises, while plain layers compute it, slowly.
    return dtype != torch.bfloat16 or bool(_ops()._is_mkldnn_bf16_supported())


def _packed(module: torch.nn.Module) -> PackedLinear | None:
    if type(module) is torch.nn.Linear:
        return PackedLinear(module.weight.detach(), None if module.bias is None else module.bias.detach())
    if type(module) is Conv1D:  # GPT-2's linear layer, its weight transposed
        return PackedLinear(module.weight.detach().t().contiguous(), module.bias.detach())
    return None


def _ops() -> Any:
    return torch.ops.mkldnn

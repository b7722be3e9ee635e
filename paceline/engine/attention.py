"""Attention over the KV slots, put into an unmodified transformers model through its attention interface.

The model is called with one keyword more (STEP_KEYWORD), which its layers hand on to the registered function. That
function writes the new keys and values into the slots and attends per sequence (``packing`` says how).
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from transformers import AttentionInterface

from paceline.engine.kv import BUCKET, SlotKV
from paceline.engine.packing import TILE, TILES_PER_BUCKET, PackedBatch
from paceline.errors import ConfigError

IMPLEMENTATION = "paceline"
"""Name under which transformers finds the function."""
STEP_KEYWORD = "paceline_step"

_HARMLESS = frozenset(
    {
        "position_ids", "position_embeddings", "use_cache", "cache_position", "output_attentions",
        "output_hidden_states", "output_router_logits", "is_causal", "dropout", "return_dict",
    }
)  # fmt: skip


class Step(Protocol):
    """What stands behind the keyword during one forward."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        """[1, H, T, D], [1, H_kv, T, D], [1, H_kv, T, Dv] of the new tokens to [1, T, H, Dv]; window 0: none."""
        ...


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    paceline_step: Step | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    if paceline_step is None:
        raise ConfigError("this architecture does not hand keywords on to its attention: it cannot be packed")
    for name, extra in extras.items():
        if extra is not None and extra is not False and name not in _HARMLESS:
            raise ConfigError(
                f"this architecture's attention uses {name}, which the packed attention does not know"
            )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    return paceline_step.attend(layer, query, key, value, scaling, sliding_window or 0), None


AttentionInterface.register(IMPLEMENTATION, _attention)


class ShapeProbe:
    """A step that only looks: which layers attend, with which shapes and windows. The output is zero."""

    def __init__(self) -> None:
        self.kv_shapes: dict[int, tuple[int, int, int]] = {}
        """layer -> (KV heads, key head size, value head size)."""
        self.windows: set[int] = set()
        self.num_calls = 0

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        self.kv_shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        self.windows.add(window)
        self.num_calls += 1
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class Masks:
    """Additive masks of tiles, as views of one table per (query heads to a KV head, window).

    A mask depends only on distances, so it is written once relative to the end of the bucket: its last 64 columns
    hold the causal edge, and a tile that reads n keys takes the last n columns.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width = -(-capacity // BUCKET) * BUCKET
        self._dtype = dtype
        self._device = device
        self._tables: dict[tuple[int, int], torch.Tensor] = {}

    def table(self, group: int, window: int) -> torch.Tensor:
        """[16 tiles of a bucket, 1, 4 * group, capacity]."""
        found = self._tables.get((group, window))
        if found is None:
            query = torch.arange(BUCKET).view(TILES_PER_BUCKET, 1, TILE, 1, 1).expand(-1, -1, -1, group, -1)
            query = query.reshape(TILES_PER_BUCKET, 1, TILE * group, 1)
            key = torch.arange(self._width) - (self._width - BUCKET)
            seen = key <= query
            if window:
                seen &= key > query - window
            table = torch.zeros(seen.shape, dtype=self._dtype).masked_fill_(~seen, float("-inf"))
            found = self._tables[group, window] = table.to(self._device)
        return found


class PackedStep:
    """The attention of one packed forward."""

    def __init__(self, batch: PackedBatch, kv: SlotKV, masks: Masks) -> None:
        self._batch = batch
        self._keys = kv.keys
        self._values = kv.values
        self._masks = masks
        self._views = [self._call_views(call.slot, call.num_tiles, call.num_keys, kv) for call in batch.calls]
        self._call_masks: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._kernel = _kernel(kv)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        rows, heads, kv_heads = key.shape[2], query.shape[1], key.shape[1]
        batch = self._batch
        self._keys[layer].index_copy_(0, batch.kv_rows, key[0].transpose(0, 1).reshape(rows, -1))
        self._values[layer].index_copy_(0, batch.kv_rows, value[0].transpose(0, 1).reshape(rows, -1))
        into, out = batch.head_indices(heads, kv_heads)
        group = heads // kv_heads
        tiles = query[0].transpose(0, 1).reshape(rows * heads, -1).index_select(0, into)
        tiles = tiles.view(-1, kv_heads, TILE * group, query.shape[3])
        masks = self._masks_of_calls(group, window)
        kernel = self._kernel
        outputs = []
        first = 0
        for call, (keys, values), mask in zip(batch.calls, self._views, masks, strict=True):
            last = first + call.num_tiles
            outputs.append(
                kernel(tiles[first:last], keys[layer], values[layer], mask, scaling).transpose(1, 2)
            )
            first = last
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        attended = attended.reshape(-1, value.shape[3]).index_select(0, out)
        return attended.view(1, rows, heads, -1)

    def _call_views(
        self, slot: int, tiles: int, num_keys: int, kv: SlotKV
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Per layer, the slot's first keys and values as [tiles, H_kv, keys, D] without a copy."""

        def views(storage: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first = kv.row(slot, 0)
            rows = storage[:, first : first + num_keys].unflatten(2, (kv.shape.kv_heads, -1)).transpose(1, 2)
            layers: tuple[torch.Tensor, ...] = rows.unsqueeze(1).expand(-1, tiles, -1, -1, -1).unbind(0)
            return layers

        return views(self._keys), views(self._values)

    def _masks_of_calls(self, group: int, window: int) -> list[torch.Tensor]:
        found = self._call_masks.get((group, window))
        if found is None:
            table = self._masks.table(group, window)
            found = [
                table[call.first_tile : call.first_tile + call.num_tiles, :, :, -call.num_keys :]
                for call in self._batch.calls
            ]
            self._call_masks[group, window] = found
        return found


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def _kernel(kv: SlotKV) -> Kernel:
    """The CPU's fused kernel is called directly: its public front adds a third to the cost of a decode row."""
    if kv.keys.device.type == "cpu" and kv.shape.key_size == kv.shape.value_size:
        return _cpu_kernel
    return _any_kernel


def _cpu_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=scaling
    )[0]
    return output


def _any_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)

"""Many sequences in one forward without padding: the new tokens of all of them lie one behind the other.

    segment A (decode)   segment B (verify, 4 rows)   segment C (prefill chunk)
    [a]                  [b b b b]                    [c c c c c c c c]            -> one row of T tokens

Attention is the only place where rows of different sequences must not meet. It works in **tiles**: the rows of a
sequence at absolute positions 4i .. 4i+3, attending over the sequence's keys up to the end of the 64-position bucket
that holds the tile, under a mask::

    keys      0 ........ 63 | 64 ....... 127
    tile 17     attends  0 ....... 127        positions 68-71, those beyond the row masked

A tile always has four rows and its place, whichever of them are new in this forward (the others hold copies whose
result nobody reads). So the arithmetic of a row depends on its position alone: neither on how a prompt was cut into
chunks, nor on how many tokens are verified at once, nor on the neighbours in the batch. That is what makes the bits
of plain and speculative decoding equal where the linear layers play along (DESIGN section 4), and it costs nothing:
one attention call takes all tiles of a bucket as its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from paceline.engine.kv import BUCKET, SlotKV, padded
from paceline.errors import EngineError

TILE = 4
TILES_PER_BUCKET = BUCKET // TILE

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one sequence in a packed forward.

    ``start`` tokens of ``slot`` are context already, which must be ``kv.length(slot)``. Logits are wanted for the
    last ``num_logits`` of the tokens: 0 for a prefill chunk that is not the last.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    num_logits: int

    @property
    def end(self) -> int:
        """Length of the sequence after the forward."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Consecutive tiles of one sequence that end in the same bucket, so that one call can take them."""

    slot: int
    first_tile: int
    """Index of the first tile in its bucket, 0 .. 15."""
    num_tiles: int
    num_keys: int
    """Positions of the slot that are read, a multiple of the bucket."""


@dataclass(slots=True)
class PackedBatch:
    """One forward in index form. T: packed tokens, at least two (a copy of the last row is added to a single one)."""

    num_rows: int
    """Rows that belong to somebody."""
    token_ids: torch.Tensor
    """[1, T] int64."""
    position_ids: torch.Tensor
    """[1, T] int64, absolute positions."""
    kv_rows: torch.Tensor
    """[T] int64: where each row's key and value go."""
    tile_rows: torch.Tensor
    """[tiles, 4] int64: the packed row at each place of each tile; any row where a place is not new."""
    row_places: torch.Tensor
    """[T] int64: the place (tile * 4 + row in tile) of each packed row."""
    calls: list[AttentionCall]
    logit_rows: torch.Tensor
    """[R] int64, R other than 1: packed rows whose logits are wanted (a single one twice)."""
    num_logits: int
    _head_indices: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def head_indices(self, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers between packed queries and tiles, G = heads / kv_heads query heads to a KV head.

        First, from [T * heads] to tiles laid out as [tiles, kv_heads, 4 * G]; second, from attention output laid
        out as [tiles, 4 * G, kv_heads] back to [T, heads]. Both flat, both counting vectors of one head.
        """
        found = self._head_indices.get((heads, kv_heads))
        if found is None:
            group = heads // kv_heads
            device = self.tile_rows.device
            kv_head = torch.arange(kv_heads, device=device)
            member = torch.arange(group, device=device)
            into = (
                self.tile_rows.view(-1, 1, TILE, 1) * heads
                + kv_head.view(1, -1, 1, 1) * group
                + member.view(1, 1, 1, -1)
            )
            out = (self.row_places.view(-1, 1, 1) * group + member.view(1, 1, -1)) * kv_heads + kv_head.view(
                1, -1, 1
            )
            found = into.reshape(-1), out.reshape(-1)
            self._head_indices[heads, kv_heads] = found
        return found


def pack(segments: Sequence[Segment], kv: SlotKV, device: torch.device) -> PackedBatch:
    """The index form of ``segments``; clears the tails of their slots.

    Raises EngineError, before anything is changed, for a segment that does not continue its slot.
    """
    check_segments(segments, kv)
    token_ids: list[int] = []
    positions: list[Indices] = []
    kv_rows: list[Indices] = []
    tile_rows: list[Indices] = []
    places: list[Indices] = []
    logit_rows: list[Indices] = []
    calls: list[AttentionCall] = []
    num_tiles = 0
    for segment in segments:
        first_row = len(token_ids)
        count = len(segment.token_ids)
        token_ids += segment.token_ids
        own = np.arange(segment.start, segment.end)
        positions.append(own)
        kv_rows.append(own + kv.row(segment.slot, 0))
        logit_rows.append(np.arange(first_row + count - segment.num_logits, first_row + count))
        low, high = segment.start // TILE, -(-segment.end // TILE)
        tile_rows.append(
            np.clip(np.arange(low * TILE, high * TILE) - segment.start, 0, count - 1) + first_row
        )
        places.append(own + (num_tiles - low) * TILE)
        num_tiles += high - low
        calls += _calls(segment.slot, low, high)
        kv.clear_tail(segment.slot, segment.end)
    num_rows = len(token_ids)
    pad = [num_rows - 1] if num_rows == 1 else []
    rows = np.concatenate([np.arange(num_rows), np.array(pad, dtype=np.int64)])
    wanted = np.concatenate(logit_rows)
    if len(wanted) == 1:
        wanted = np.repeat(wanted, 2)

    def tensor(values: Indices) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return PackedBatch(
        num_rows=num_rows,
        token_ids=tensor(np.array(token_ids, dtype=np.int64)[rows]).unsqueeze(0),
        position_ids=tensor(np.concatenate(positions)[rows]).unsqueeze(0),
        kv_rows=tensor(np.concatenate(kv_rows)[rows]),
        tile_rows=tensor(np.concatenate(tile_rows)).view(-1, TILE),
        row_places=tensor(np.concatenate(places)[rows]),
        calls=calls,
        logit_rows=tensor(wanted),
        num_logits=sum(segment.num_logits for segment in segments),
    )


def _calls(slot: int, low: int, high: int) -> list[AttentionCall]:
    """Tiles ``low`` to ``high`` of a sequence, cut at bucket edges."""
    calls = []
    while low < high:
        edge = (low // TILES_PER_BUCKET + 1) * TILES_PER_BUCKET
        stop = min(high, edge)
        calls.append(AttentionCall(slot, low % TILES_PER_BUCKET, stop - low, edge * TILE))
        low = stop
    return calls


def check_segments(segments: Sequence[Segment], kv: SlotKV) -> None:
    """Raises EngineError for segments that do not continue their slots, name one twice, or hold what is no token."""
    if not segments:
        raise EngineError("a forward needs at least one segment")
    slots = set()
    for segment in segments:
        length = kv.length(segment.slot)
        count = len(segment.token_ids)
        if segment.slot in slots:
            raise EngineError(f"KV slot {segment.slot} appears twice in one forward")
        slots.add(segment.slot)
        if segment.start != length:
            raise EngineError(
                f"KV slot {segment.slot} holds {length} tokens, the segment starts at {segment.start}"
            )
        if not count or not 0 <= segment.num_logits <= count:
            raise EngineError(
                f"{count} tokens with {segment.num_logits} logits: expected 0 <= logits <= tokens, 1 <= tokens"
            )
        if min(segment.token_ids) < 0:  # an array would count it from the end of the vocabulary
            raise EngineError(f"KV slot {segment.slot}: {min(segment.token_ids)} is no token")
        if segment.end > kv.capacity:
            raise EngineError(f"KV slot {segment.slot}: {segment.end} tokens do not fit into {kv.capacity}")


__all__ = [
    "TILE",
    "TILES_PER_BUCKET",
    "AttentionCall",
    "PackedBatch",
    "Segment",
    "check_segments",
    "pack",
    "padded",
]

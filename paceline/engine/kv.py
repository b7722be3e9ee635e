"""The keys and values of all sequences in one place: a slot per sequence, rollback by setting a length.

Storage, for keys and for values alike, is one tensor per tier::

    [layers, slots x stride, heads x head size]        row = slot * stride + position

The native kernels keep the keys of a block of 16 positions among each other in an order of their own (``kernels/interface.h``).

What lies in a slot beyond its length is garbage that is never read as if it were context: attention masks it, and
before a slot's tail is touched at all it is cleared of what earlier sequences left (see ``clear_tail``).
"""

import heapq
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import ConfigError, EngineError

BUCKET = 64
"""Attention reads a slot in multiples of so many positions, so that its arithmetic depends on a row's position only."""

BLOCK = 16
"""A runner may keep the keys of so many positions among each other in any order: they are copied together."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one position costs: layers, KV heads, size of a key head and of a value head."""

    layers: int
    kv_heads: int
    key_size: int
    value_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one position over all layers."""
        return self.layers * self.kv_heads * (self.key_size + self.value_size) * dtype.itemsize


class SlotKV:
    """Owns the slots: who has one, how long it is, where its rows lie. For one thread."""

    def __init__(
        self, shape: KVShape, *, num_slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``num_slots`` sequences of up to ``capacity`` tokens each.

        Raises ConfigError when that does not fit into the memory that is free now: the allocator is never asked for
        what admission has promised. Pages of a CPU become resident only when a sequence reaches them.
        """
        self.num_slots = num_slots
        self.capacity = capacity
        self.stride = padded(capacity)
        self.shape = shape
        self.nbytes = num_slots * self.stride * shape.bytes_per_token(dtype)
        _check_memory(self.nbytes, num_slots, capacity, device)
        rows = num_slots * self.stride
        self.keys = torch.empty(
            (shape.layers, rows, shape.kv_heads * shape.key_size), dtype=dtype, device=device
        )
        self.values = torch.empty(
            (shape.layers, rows, shape.kv_heads * shape.value_size), dtype=dtype, device=device
        )
        self._lengths: list[int | None] = [None] * num_slots  # None: free
        self._free = list(range(num_slots))  # a heap: the lowest slot first, so that few pages are touched
        self._clean = [0] * num_slots  # positions below this hold nothing of an earlier sequence

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    @property
    def num_tokens(self) -> int:
        """Tokens in all slots that somebody has, or that are kept for reuse; from any thread."""
        return sum([length for length in self._lengths if length is not None])

    def is_idle(self) -> bool:
        """Whether every slot is free again: the balance that must hold when no sequence runs."""
        free = [slot for slot, length in enumerate(self._lengths) if length is None]
        return sorted(self._free) == free == list(range(self.num_slots))

    def acquire(self) -> int | None:
        """An empty slot, or None when all are taken. Give it back with ``release``."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._lengths[slot] = 0
        self._clean[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        """Give ``slot`` back; its contents are garbage from now on."""
        self.length(slot)
        self._lengths[slot] = None
        heapq.heappush(self._free, slot)

    def length(self, slot: int) -> int:
        """Tokens of ``slot`` that are context. Raises EngineError for a slot that nobody has."""
        length = self._lengths[slot] if 0 <= slot < self.num_slots else None
        if length is None:
            raise EngineError(f"KV slot {slot} is not in use")
        return length

    def truncate(self, slot: int, length: int) -> None:
        """Roll back to the first ``length`` tokens: only the number changes."""
        current = self.length(slot)
        if not 0 <= length <= current:
            raise EngineError(f"KV slot {slot}: cannot cut {current} tokens to {length}")
        self._lengths[slot] = length

    def extend(self, slot: int, count: int) -> None:
        """Count ``count`` more tokens, whose rows have just been written for every layer."""
        length = self.length(slot) + count
        if count < 0 or length > self.capacity:
            raise EngineError(f"KV slot {slot}: {length} tokens do not fit into {self.capacity}")
        self._lengths[slot] = length

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Make the first ``length`` tokens of ``source`` the contents of ``target``, whatever that held."""
        if not 0 <= length <= self.length(source):
            raise EngineError(f"KV slot {source}: cannot copy {length} of {self.length(source)} tokens")
        self.length(target)
        first, other = self.row(source, 0), self.row(target, 0)
        whole = -(-length // BLOCK) * BLOCK
        self.keys[:, other : other + whole] = self.keys[:, first : first + whole]
        self.values[:, other : other + length] = self.values[:, first : first + length]
        self._lengths[target] = self._clean[target] = length

    def hand_over(self, slot: int, length: int) -> None:
        """Keep the first ``length`` tokens for another sequence; the rest counts as left by an earlier one."""
        self.truncate(slot, length)
        self._clean[slot] = length

    def row(self, slot: int, position: int) -> int:
        """Storage row of ``position`` in ``slot``."""
        return slot * self.stride + position

    def clear_tail(self, slot: int, end: int) -> None:
        """Make the rows from ``end`` to the end of its bucket safe to read under a mask.

        A mask multiplies by zero, and zero times a NaN left by an earlier sequence is NaN. So those rows become
        zero, once per bucket and sequence. What the sequence itself writes and rolls back later stays.
        """
        edge = padded(end)
        if self._clean[slot] < edge:
            first, last = self.row(slot, end), self.row(slot, edge)
            self.keys[:, first:last].zero_()
            self.values[:, first:last].zero_()
            self._clean[slot] = edge


def padded(length: int) -> int:
    """``length`` rounded up to whole buckets."""
    return -(-length // BUCKET) * BUCKET


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken on ``device``; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    try:  # a container's own limit
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def _check_memory(nbytes: int, num_slots: int, capacity: int, device: torch.device) -> None:
    free = available_memory(device)
    if free is not None and nbytes > free:
        fitting = max(0, int(num_slots * free * 0.9 / nbytes))
        raise ConfigError(
            f"kv_slots = {num_slots} with max_context = {capacity} needs {nbytes / 2**20:.0f} MiB of KV memory on "
            f"{device}, {free / 2**20:.0f} MiB are free: lower kv_slots to {fitting} or lower max_context"
        )

"""Prefix reuse over KV slots: a finished sequence's slot stays readable until somebody needs the memory.

A new sequence starts from the longest prefix that another one in the same scope has in memory, running or finished.
The prefix's rows are copied into the new slot, so no two sequences ever share a row that one of them may write; a copy costs
a few microseconds a token, running the token through the model a few thousand. A conversation that goes on where it
ended takes its old slot over without a copy. Where a row's bits depend on its position only (see ``packing``), a
warm start gives the same bits as a cold one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.engine.kv import SlotKV

MIN_REUSE = 16
"""Shorter common prefixes (a template's first words) are not worth a look at the memory of others."""

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot for a new sequence; its first ``reused`` tokens are context already."""

    slot: int
    reused: int


@dataclass(slots=True, eq=False)
class _Held:
    """A slot with known contents: in use by a sequence, or kept after its end."""

    slot: int
    scope: str
    tokens: _Ids
    in_use: bool
    last_use: int


class PrefixSlots:
    """Hands out the slots of ``kv`` and remembers what they hold. For one thread, the only one that acquires slots.

    ``scope`` separates tenants: a prefix is never looked for outside its own. free + kept + in use = all slots.
    """

    def __init__(self, kv: SlotKV) -> None:
        self._kv = kv
        self._held: dict[int, _Held] = {}
        self._uses = 0
        self.tokens_reused = 0
        self.tokens_asked = 0

    @property
    def num_available(self) -> int:
        """Slots that a new sequence can get: free ones and kept ones."""
        return self._kv.num_slots - self.num_in_use

    @property
    def num_in_use(self) -> int:
        """Slots of running sequences."""
        return sum(held.in_use for held in self._held.values())

    @property
    def num_kept(self) -> int:
        """Slots that only hold what finished sequences left."""
        return len(self._held) - self.num_in_use

    def acquire(self, token_ids: Sequence[int], scope: str) -> Lease | None:
        """A slot for a sequence that starts with ``token_ids``, or None when all are in use.

        The last token is never reused: it has to run, so that there are logits to go on from.
        """
        tokens = np.asarray(token_ids, dtype=np.int64)
        self._uses += 1
        source, reused = self._longest(tokens[:-1], scope)
        if source is not None and not source.in_use and reused == len(source.tokens):
            slot = (
                source.slot
            )  # it ends where we go on: nobody else can need more of it than a copy of ours gives
        else:
            found = self._empty_slot(source)
            if found is None:
                return None
            slot = found
            if source is not None and source.slot != slot:
                self._kv.copy_prefix(source.slot, slot, reused)
                source.last_use = self._uses
        self._kv.hand_over(slot, reused)
        self._held[slot] = _Held(slot, scope, tokens, in_use=True, last_use=self._uses)
        self.tokens_asked += len(tokens)
        self.tokens_reused += reused
        return Lease(slot, reused)

    def release(self, slot: int, token_ids: Sequence[int]) -> None:
        """The sequence in ``slot`` has ended with ``token_ids``; what of them is context is kept while there is room."""
        held = self._held[slot]
        assert held.in_use, "released once"
        length = self._kv.length(slot)
        if length < MIN_REUSE:
            self.discard(slot)
            return
        held.tokens = np.asarray(token_ids[:length], dtype=np.int64)
        held.in_use = False
        self._uses += 1
        held.last_use = self._uses

    def discard(self, slot: int) -> None:
        """Give the slot back without keeping its contents."""
        del self._held[slot]
        self._kv.release(slot)

    def clear(self) -> None:
        """Forget everything that is only kept."""
        for held in [held for held in self._held.values() if not held.in_use]:
            self.discard(held.slot)

    def is_idle(self) -> bool:
        """Whether nothing is in use and free + kept = all: what must hold when no sequence runs."""
        return not self.num_in_use and self._kv.num_free + self.num_kept == self._kv.num_slots

    def _longest(self, tokens: _Ids, scope: str) -> tuple[_Held | None, int]:
        """The slot with the longest usable common prefix, and its length; kept ones first among equals."""
        best: _Held | None = None
        longest = MIN_REUSE - 1
        for held in sorted(self._held.values(), key=lambda held: held.in_use):
            if held.scope != scope:
                continue
            valid = min(len(held.tokens), self._kv.length(held.slot), len(tokens))
            if valid <= longest:
                continue
            differing = np.flatnonzero(held.tokens[:valid] != tokens[:valid])
            common = int(differing[0]) if len(differing) else valid
            if common > longest:
                best, longest = held, common
        return (best, longest) if best is not None else (None, 0)

    def _empty_slot(self, source: _Held | None) -> int | None:
        """A free slot, else the one kept longest without use; ``source`` itself only when nothing else is left."""
        slot = self._kv.acquire()
        if slot is not None:
            return slot
        kept = [held for held in self._held.values() if not held.in_use]
        if not kept:
            return None
        victim = min(kept, key=lambda held: (held is source, held.last_use))
        return victim.slot

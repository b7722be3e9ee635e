"""A deliberately bad drafter: ids drawn evenly from the vocabulary. The strongest single test of rollback.

Its guesses are keyed, not drawn from a generator: the same question gets the same answer, in any order.
"""

from collections.abc import Sequence

from draft_service.drafters.base import DraftRequest

_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class RandomDrafter:
    """See the module. ``seed`` is the key of its guesses, together with the request's seed and the position."""

    slow = False
    max_context = 0

    def __init__(self, name: str, *, seed: int) -> None:
        self.name = name
        self.version = f"random-1-{seed}"
        self._key = _mixed(seed & _MASK)

    def open(self, handle: int) -> None:
        """Nothing to keep."""

    def propose(self, batch: Sequence[DraftRequest]) -> list[list[int] | None]:
        """Always ``k`` guesses."""
        return [self._guesses(request) for request in batch]

    def close(self, handle: int) -> None:
        """Nothing to free."""

    def _guesses(self, request: DraftRequest) -> list[int]:
        row_key = _mixed(self._key ^ (request.sampling.seed & _MASK))
        first = len(request.token_ids)
        return [_mixed(row_key ^ (first + i)) % request.vocab_size for i in range(request.k)]

"""Earlier texts to look up in, in a bounded memory, each for its own scope."""

from collections import deque
from collections.abc import Sequence

from paceline.lookup.history import BLOCK, NOTHING, Continuation, NativeHistory, sized_history

_LEVELS = (2, 6)
_SLICE = 128
"""Tokens that go into the pool at a time: about 50 us, so that nobody waits long."""
_MOST_WAITING = 100_000
"""Finished tokens that may wait for a quiet moment; beyond, each close puts its own share in at once."""


class Pool:
    """Earlier texts, by scope, in a fixed budget: the oldest piece goes first. Pieces go in slice by slice."""

    def __init__(self, budget_bytes: int) -> None:
        self._history, self.capacity = sized_history(budget_bytes, _LEVELS)
        self._ids: dict[str, list[int]] = {}  # scope -> [its number, pieces that are of it]
        self._scopes: deque[str] = deque()  # of the pieces, oldest first
        self._next_id = 1
        self._waiting: deque[tuple[str, list[int]]] = deque()
        self._num_waiting = 0
        self._rest: list[int] = []  # of the piece that is going in

    @property
    def num_waiting(self) -> int:
        """Tokens that are not in yet."""
        return self._num_waiting

    def add(self, scope: str, token_ids: list[int]) -> None:
        """Remember a text; it goes in with the next calls of ``settle``."""
        token_ids = token_ids[-(self.capacity - BLOCK) :]
        if len(token_ids) > _LEVELS[0]:
            self._waiting.append((scope, token_ids))
            self._num_waiting += len(token_ids)
        while self._num_waiting > _MOST_WAITING:
            self.settle()

    def settle(self, limit: int = _SLICE) -> bool:
        """Put up to ``limit`` waiting tokens in; whether more wait."""
        if not self._rest:
            if not self._waiting:
                return False
            scope, self._rest = self._waiting.popleft()
            number = self._entered(scope)
            for _ in range(self._history.begin(len(self._rest), number)):
                self._left()
        piece, self._rest = self._rest[:limit], self._rest[limit:]
        self._history.append(piece)
        self._num_waiting -= len(piece)
        return bool(self._rest or self._waiting)

    def after(self, scope: str, context: Sequence[int], k: int) -> Continuation:
        """See History."""
        known = self._ids.get(scope)
        return self._history.after(context, known[0], k) if known else NOTHING

    def native(self, scope: str) -> tuple[int | None, int]:
        """(history for compiled code, None where it has nothing of ``scope``; the scope's number)."""
        known = self._ids.get(scope)
        if known is None or not isinstance(self._history, NativeHistory):
            return None, 0
        return self._history.handle, known[0]

    def _entered(self, scope: str) -> int:
        known = self._ids.get(scope)
        if known is None:
            known = self._ids[scope] = [self._next_id, 0]
            self._next_id = (self._next_id + 1) & 0xFFFFFFFF
        known[1] += 1
        self._scopes.append(scope)
        return known[0]

    def _left(self) -> None:
        scope = self._scopes.popleft()
        known = self._ids[scope]
        known[1] -= 1
        if not known[1]:
            del self._ids[scope]

"""Suffix drafting: the longest suffix of the text that stood somewhere before says how it may go on.

"Before" is the request itself, like in prompt lookup, and a pool of earlier texts of the same tenant. Where a context
stood several times the majority decides, token by token (Oliaro et al. 2024, "SuffixDecoding", has trees for this; here
``history`` walks chains of places, so that a token takes some 20 bytes however many there are, and forgetting costs nothing).

How much to guess: every guess gets a probability, the share of votes times how far such votes could be trusted until
now (by source, length of the match and number of votes; learned from what the verifier committed). The path ends where
the probability of all of it falls under ``min_probability``. No model, no forward, and nothing is ever rolled back:
only confirmed tokens are looked up or remembered.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.drafters.base import DraftRequest, Weighed
from draft_service.drafters.history import (
    BLOCK,
    NOTHING,
    Continuation,
    History,
    native_library,
    own_history,
    sized_history,
)
from paceline.ranges import MAX_K

MAX_MATCH = 32
"""Matches are not followed further back than this."""
_OWN_LEVELS = (1, 2, 4, 8)
_POOL_LEVELS = (2, 6)
_LEAD_IN = 12
"""Prompt tokens that go into the pool before an output, so that its beginning can be found."""
_SLICE = 128
"""Tokens that go into the pool at a time: about 50 us, so that nobody waits long."""
_MOST_WAITING = 100_000
"""Finished tokens that may wait for a quiet moment; beyond, each close puts its own share in at once."""
_OWN_ROOM = 512

_TRUST_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_PRIOR = 8.0  # votes seen beforehand
_PRIOR_RIGHT = 0.6


class Trust:
    """How often votes were right, by where they came from: learned, shared by all sequences."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int, int], list[float]] = {}
        longest = MAX_MATCH + MAX_K
        self._bucket = [sum(length >= low for low in _TRUST_LENGTHS) for length in range(longest + 1)]

    def of(self, source: int, match_len: int, votes: int) -> list[float]:
        """[votes right, shares of votes given] of such guesses."""
        key = (source, self._bucket[match_len], min(votes, 8).bit_length())
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = [_PRIOR * _PRIOR_RIGHT, _PRIOR]
        return cell


@dataclass(frozen=True, slots=True)
class Path:
    """A continuation with what each of its tokens is worth. ``probabilities`` are those of the path so far."""

    source: int
    continuation: Continuation
    probabilities: list[float]


@dataclass(slots=True)
class _Sequence:
    own: History
    room: int
    token_ids: list[int] = field(default_factory=list)
    prompt_len: int = 0
    scope: str = ""
    paths: tuple[Path, ...] = ()


class Pool:
    """Earlier texts, by scope, in a fixed budget: the oldest piece goes first. Pieces go in slice by slice."""

    def __init__(self, budget_bytes: int) -> None:
        self._history, self.capacity = sized_history(budget_bytes, _POOL_LEVELS)
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
        if len(token_ids) > _POOL_LEVELS[0]:
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


class SuffixDrafter:
    """See the module. ``shared``: one pool for all tenants; otherwise a tenant's texts serve that tenant only."""

    slow = False
    max_context = 0

    def __init__(
        self,
        name: str,
        *,
        pool_bytes: int,
        min_probability: float,
        shared: bool = False,
    ) -> None:
        self.name = name
        self.version = f"suffix-1-{min_probability:g}"
        self._pool = Pool(pool_bytes) if pool_bytes else None
        self._min_probability = min_probability
        self._shared = shared
        native_library()  # compiled now, not at the first question
        self._trust = Trust()
        self._sequences: dict[int, _Sequence] = {}

    def open(self, handle: int) -> None:
        """Start an empty text."""
        self._sequences[handle] = _Sequence(own_history(_OWN_ROOM, _OWN_LEVELS), _OWN_ROOM)
        self._sequences[handle].own.begin(_OWN_ROOM, 0)

    def propose(self, batch: Sequence[DraftRequest]) -> list[list[int] | None]:
        """Read what is new, learn from it, look up the suffix."""
        return [weighed.token_ids for weighed in self.weigh(batch)]

    def weigh(self, batch: Sequence[DraftRequest]) -> list[Weighed]:
        """The same with the probability of each guess."""
        return [self._weighed(request) for request in batch]

    def close(self, handle: int) -> None:
        """Hand the text to the pool."""
        sequence = self._sequences.pop(handle, None)
        if sequence is None or self._pool is None or not sequence.scope:
            return
        # Prompts would fill the pool and change nothing: 2.27 tokens a round on repeated templates with and without.
        start = max(0, sequence.prompt_len - _LEAD_IN)
        self._pool.add(sequence.scope, sequence.token_ids[start:])

    def tidy(self) -> bool:
        """Put a slice of finished texts into the pool; whether there are more."""
        return self._pool is not None and self._pool.settle()

    def _weighed(self, request: DraftRequest) -> Weighed:
        sequence = self._sequences[request.handle]
        new = request.token_ids[len(sequence.token_ids) :]
        self._learn(sequence, new)
        self._read(sequence, request, new)
        context = sequence.token_ids[-MAX_MATCH:]
        paths = [self._path(0, sequence.own.after_own_end(context, request.k))]
        if self._pool is not None and sequence.scope:
            paths.append(self._path(1, self._pool.after(sequence.scope, context, request.k)))
        sequence.paths = tuple(paths)
        return max((self._cut(path) for path in paths), key=lambda cut: sum(cut.probabilities))

    def _cut(self, path: Path) -> Weighed:
        likely = [
            p for p in path.probabilities if p >= self._min_probability
        ]  # they only fall along the path
        return Weighed(path.continuation.token_ids[: len(likely)], likely)

    def _path(self, source: int, continuation: Continuation) -> Path:
        probability = 1.0
        probabilities = []
        length = continuation.match_len
        for votes, agreed in zip(continuation.votes, continuation.agreed, strict=True):
            right, given = self._trust.of(source, length, votes)
            probability *= agreed / votes * right / given
            probabilities.append(min(probability, 1.0))
            length += 1
        return Path(source, continuation, probabilities)

    def _learn(self, sequence: _Sequence, new: Sequence[int]) -> None:
        for path in sequence.paths:
            found = path.continuation
            length = found.match_len
            for guess, votes, agreed, token in zip(
                found.token_ids, found.votes, found.agreed, new, strict=False
            ):
                cell = self._trust.of(path.source, length, votes)
                cell[1] += agreed / votes
                length += 1
                if guess != token:
                    break
                cell[0] += 1.0

    def _read(self, sequence: _Sequence, request: DraftRequest, new: Sequence[int]) -> None:
        sequence.prompt_len = request.prompt_len
        sequence.scope = "shared" if self._shared else request.scope
        sequence.token_ids += new
        if len(sequence.token_ids) > sequence.room:
            sequence.room = 2 * len(sequence.token_ids)
            sequence.own = own_history(sequence.room, _OWN_LEVELS)
            sequence.own.begin(sequence.room, 0)
            new = sequence.token_ids
        sequence.own.append(new)

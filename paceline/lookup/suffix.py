"""Suffix look-up: the longest suffix of the text that stood somewhere before says how it may go on.

"Before" is the request itself, like in prompt lookup, and a pool of earlier texts of the same tenant. Where a context
stood several times the majority decides, token by token (Oliaro et al. 2024, "SuffixDecoding", has trees for this; here
``history`` walks chains of places, so that a token takes some 20 bytes however many there are, and forgetting costs nothing).

How much to guess: every guess gets a probability, the share of votes times how far such votes could be trusted until
now (by source, length of the match and number of votes, and by how guesses fared in this text; learned from what was
committed, whether it was guessed or not). The path ends where the probability of all of it falls under
``min_probability``. No model, no forward, and nothing is ever rolled back: only confirmed tokens are looked up or
remembered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.lookup.base import Weighed
from paceline.lookup.history import Continuation, History, native_library, own_history
from paceline.lookup.pool import Pool
from paceline.lookup.trust import MAX_MATCH, Luck, Trust

_OWN_LEVELS = (1, 2, 4, 8)
_LEAD_IN = 12
"""Prompt tokens that go into the pool before an output, so that its beginning can be found."""
_OWN_ROOM = 512


@dataclass(frozen=True, slots=True)
class _Path:
    """A continuation with what each of its tokens is worth: chances given those before it, and of the path so far."""

    source: int
    continuation: Continuation
    chances: list[float]
    probabilities: list[float]


@dataclass(slots=True)
class _Text:
    own: History
    room: int
    token_ids: list[int] = field(default_factory=list)
    prompt_len: int = 0
    scope: str = ""
    paths: tuple[_Path, ...] = ()
    luck: tuple[Luck, Luck] = field(default_factory=lambda: (Luck(), Luck()))


class SuffixLookup:
    """See the module. ``shared``: one pool for all tenants; otherwise a tenant's texts serve that tenant only."""

    def __init__(self, name: str, *, pool_bytes: int, min_probability: float, shared: bool = False) -> None:
        self.name = name
        self.version = f"suffix-2-{min_probability:g}"
        self._pool = Pool(pool_bytes) if pool_bytes else None
        self._min_probability = min_probability
        self._shared = shared
        native_library()  # compiled now, not at the first question
        self._trust = Trust()
        self._texts: dict[int, _Text] = {}

    def open(self, handle: int) -> None:
        """Start an empty text."""
        self._texts[handle] = text = _Text(own_history(_OWN_ROOM, _OWN_LEVELS), _OWN_ROOM)
        text.own.begin(_OWN_ROOM, 0)

    def guess(self, handle: int, token_ids: Sequence[int], *, prompt_len: int, scope: str, k: int) -> Weighed:
        """Read what is new, learn from it, look up the suffix."""
        text = self._texts[handle]
        new = token_ids[len(text.token_ids) :]
        self._learn(text, new)
        text.prompt_len = prompt_len
        text.scope = "shared" if self._shared else scope
        self._read(text, new)
        context = text.token_ids[-MAX_MATCH:]
        paths = [self._path(0, text, text.own.after_own_end(context, k))]
        if self._pool is not None and text.scope:
            paths.append(self._path(1, text, self._pool.after(text.scope, context, k)))
        text.paths = tuple(paths)
        return max((self._cut(path) for path in paths), key=lambda cut: sum(cut.probabilities))

    def close(self, handle: int) -> None:
        """Hand the text to the pool."""
        text = self._texts.pop(handle, None)
        if text is None or self._pool is None or not text.scope:
            return
        # Prompts would fill the pool and change nothing: 2.27 tokens a round on repeated templates with and without.
        start = max(0, text.prompt_len - _LEAD_IN)
        self._pool.add(text.scope, text.token_ids[start:])

    def tidy(self) -> bool:
        """Put a slice of finished texts into the pool; whether there are more."""
        return self._pool is not None and self._pool.settle()

    # --- inside -----------------------------------------------------------------------------------------------

    def _cut(self, path: _Path) -> Weighed:
        # They only fall along the path.
        likely = [chance for chance in path.probabilities if chance >= self._min_probability]
        return Weighed(path.continuation.token_ids[: len(likely)], likely)

    def _path(self, source: int, text: _Text, found: Continuation) -> _Path:
        factor = text.luck[source].factor
        probability = 1.0
        chances, probabilities = [], []
        length = found.match_len
        for votes, agreed in zip(found.votes, found.agreed, strict=True):
            right, given = self._trust.of(source, length, votes)
            chance = agreed / votes * right / given
            probability *= min(chance * factor, 1.0)
            chances.append(chance)
            probabilities.append(probability)
            length += 1
        return _Path(source, found, chances, probabilities)

    def _learn(self, text: _Text, new: Sequence[int]) -> None:
        for path in text.paths:
            found, luck = path.continuation, text.luck[path.source]
            length = found.match_len
            for guess, votes, agreed, chance, token in zip(
                found.token_ids, found.votes, found.agreed, path.chances, new, strict=False
            ):
                cell = self._trust.of(path.source, length, votes)
                cell[1] += agreed / votes
                length += 1
                luck.observe(min(chance, 1.0), right=guess == token)
                if guess != token:
                    break
                cell[0] += 1.0

    def _read(self, text: _Text, new: Sequence[int]) -> None:
        text.token_ids += new
        if len(text.token_ids) > text.room:
            text.room = 2 * len(text.token_ids)
            text.own = own_history(text.room, _OWN_LEVELS)
            text.own.begin(text.room, 0)
            new = text.token_ids
        text.own.append(new)

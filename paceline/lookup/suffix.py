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
from operator import attrgetter

from paceline.lookup.base import Weighed
from paceline.lookup.history import Continuation, History, native_library, own_history
from paceline.lookup.pool import Pool
from paceline.lookup.trust import MAX_MATCH, Luck, Path, Trust

_OWN_LEVELS = (1, 2, 4, 8)
_LEAD_IN = 12
"""Prompt tokens that go into the pool before an output, so that its beginning can be found."""
_OWN_ROOM = 512


@dataclass(slots=True)
class _Text:
    own: History
    room: int
    token_ids: list[int] = field(default_factory=list)
    prompt_len: int = 0
    scope: str = ""
    paths: tuple[Path, ...] = ()
    """In the text itself, in the pool."""
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
        for path, luck in zip(text.paths, text.luck, strict=False):
            path.settle(new, luck)
        text.prompt_len = prompt_len
        text.scope = "shared" if self._shared else scope
        self._read(text, new)
        context = text.token_ids[-MAX_MATCH:]
        paths = [self._path(0, text, text.own.after_own_end(context, k))]
        if self._pool is not None and text.scope:
            paths.append(self._path(1, text, self._pool.after(text.scope, context, k)))
        text.paths = tuple(paths)
        return max(paths, key=_worth).weighed()

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

    def _path(self, source: int, text: _Text, found: Continuation) -> Path:
        path, factor = Path(), text.luck[source].factor
        length = found.match_len
        for token, votes, agreed in zip(found.token_ids, found.votes, found.agreed, strict=True):
            cell = self._trust.of(source, length, votes)
            if not path.add(token, cell, agreed / votes, factor, self._min_probability):
                break
            length += 1
        return path

    def _read(self, text: _Text, new: Sequence[int]) -> None:
        text.token_ids += new
        if len(text.token_ids) > text.room:
            text.room = 2 * len(text.token_ids)
            text.own = own_history(text.room, _OWN_LEVELS)
            text.own.begin(text.room, 0)
            new = text.token_ids
        text.own.append(new)


_worth = attrgetter("worth")

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

import ctypes
from array import array
from collections.abc import Sequence
from typing import Protocol

from paceline.lookup.base import Weighed
from paceline.lookup.history import MAX_FOUND, MAX_STEPS, Continuation, own_history
from paceline.lookup.native import Answer, Handle, native_library
from paceline.lookup.pool import Pool
from paceline.lookup.trust import MAX_MATCH, Luck, Path, Trust
from paceline.ranges import MAX_K

_OWN_LEVELS = (1, 2, 4, 8)
_LEAD_IN = 12
"""Prompt tokens that go into the pool before an output, so that its beginning can be found."""
_OWN_ROOM = 512


class SuffixText(Protocol):
    """One text. ``PlainTexts`` and ``NativeTexts`` make them, of one meaning."""

    def guess(self, new: Sequence[int], pool: Pool | None, scope: str, k: int) -> Weighed:
        """The text has gone on by ``new``: learn from that, and look up the suffix in the text and in what the pool has of ``scope``."""


class SuffixLookup:
    """See the module. ``shared``: one pool for all tenants; otherwise a tenant's texts serve that tenant only."""

    def __init__(
        self, name: str, *, pool_bytes: int, min_probability: float, shared: bool = False, native: bool = True
    ) -> None:
        """``native`` False: in Python even where there is a compiler, to compare."""
        self.name = name
        self.version = f"suffix-2-{min_probability:g}"
        self._pool = Pool(pool_bytes) if pool_bytes else None
        self._shared = shared
        library = native_library() if native else None
        self._new: PlainTexts | NativeTexts = (
            PlainTexts(min_probability) if library is None else NativeTexts(library, min_probability)
        )
        self._texts: dict[int, _Open] = {}

    def open(self, handle: int) -> None:
        """Start an empty text."""
        self._texts[handle] = _Open(self._new.text())

    def guess(self, handle: int, token_ids: Sequence[int], *, prompt_len: int, scope: str, k: int) -> Weighed:
        """Read what is new, learn from it, look up the suffix."""
        text = self._texts[handle]
        new = token_ids[len(text.token_ids) :]
        text.prompt_len = prompt_len
        text.scope = "shared" if self._shared else scope
        weighed = text.text.guess(new, self._pool if text.scope else None, text.scope, min(k, MAX_K))
        text.token_ids += new  # not before: what cannot be read must not go into the pool either
        return weighed

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


class _Open:
    """A text as the pool will want it, and what looks up in it."""

    __slots__ = ("prompt_len", "scope", "text", "token_ids")

    def __init__(self, text: SuffixText) -> None:
        self.text = text
        self.token_ids: list[int] = []
        self.prompt_len = 0
        self.scope = ""


# --- in Python ------------------------------------------------------------------------------------------------------


class PlainTexts:
    """Texts that trust in common."""

    def __init__(self, min_probability: float) -> None:
        self._min_probability = min_probability
        self._trust = Trust()

    def text(self) -> SuffixText:
        """An empty one."""
        return _PlainText(self._trust, self._min_probability)


class _PlainText:
    def __init__(self, trust: Trust, min_probability: float) -> None:
        self._trust = trust
        self._min_probability = min_probability
        self._room = _OWN_ROOM
        self._own = own_history(_OWN_ROOM, _OWN_LEVELS)
        self._own.begin(_OWN_ROOM, 0)
        self._token_ids: list[int] = []
        self._paths: tuple[Path, ...] = ()  # in the text itself, in the pool
        self._luck = (Luck(), Luck())

    def guess(self, new: Sequence[int], pool: Pool | None, scope: str, k: int) -> Weighed:
        """See SuffixText."""
        for path, luck in zip(self._paths, self._luck, strict=False):
            path.settle(new, luck)
        self._read(new)
        context = self._token_ids[-MAX_MATCH:]
        own = self._path(0, self._own.after_own_end(context, k))
        pooled = self._path(1, pool.after(scope, context, k)) if pool is not None else Path()
        self._paths = own, pooled
        return (pooled if pooled.worth > own.worth else own).weighed()

    def _path(self, source: int, found: Continuation) -> Path:
        path, factor = Path(), self._luck[source].factor
        length = found.match_len
        for token, votes, agreed in zip(found.token_ids, found.votes, found.agreed, strict=True):
            cell = self._trust.of(source, length, votes)
            if not path.add(token, cell, agreed / votes, factor, self._min_probability):
                break
            length += 1
        return path

    def _read(self, new: Sequence[int]) -> None:
        self._token_ids += new
        if len(self._token_ids) > self._room:
            self._room = 2 * len(self._token_ids)
            self._own = own_history(self._room, _OWN_LEVELS)
            self._own.begin(self._room, 0)
            new = self._token_ids
        self._own.append(new)


# --- compiled -------------------------------------------------------------------------------------------------------


class NativeTexts:
    """Texts that trust in common, over ``lookup.cpp``."""

    def __init__(self, library: ctypes.CDLL, min_probability: float) -> None:
        self.core = library
        self.min_probability = min_probability
        self.trust = Handle(library, "trust")
        self.answer = Answer()
        self._levels = (ctypes.c_int * len(_OWN_LEVELS))(*_OWN_LEVELS)

    def text(self) -> SuffixText:
        """An empty one. Raises MemoryError."""
        return _NativeText(self, Handle(self.core, "suffix_text", _OWN_ROOM, self._levels, len(_OWN_LEVELS)))


class _NativeText:
    __slots__ = ("_text", "_texts")

    def __init__(self, texts: NativeTexts, text: Handle) -> None:
        self._texts, self._text = texts, text

    def guess(self, new: Sequence[int], pool: Pool | None, scope: str, k: int) -> Weighed:
        """See SuffixText."""
        texts, tokens = self._texts, array("i", new)
        history, number = pool.native(scope) if pool is not None else (None, 0)
        answer = texts.answer
        made = texts.core.suffix_guess(
            self._text.pointer, texts.trust.pointer, history, number, tokens.buffer_info()[0], len(tokens),
            MAX_FOUND, MAX_STEPS, k, texts.min_probability, answer.tokens_at, answer.probabilities_at,
        )  # fmt: skip
        if made < 0:
            raise MemoryError("no memory for the history of a text")
        return answer.weighed(made)

"""Prompt lookup: the longest suffix of the text that stood in it before says how it may go on.

Saxena 2023, "Prompt Lookup Decoding". Costs no memory traffic and no model: it pays where the answer repeats the
prompt or itself (extraction, rewriting, code edits). Only committed tokens are indexed, so nothing is ever rolled back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.lookup.base import Weighed
from paceline.lookup.trust import MAX_MATCH, Luck, Path, Trust

# Keys are polynomial hashes cut to 61 bits; a collision is seen when the tokens are compared, and costs a guess.
_MULTIPLIER = 0x1B873593_5BD1E995
_MASK = (1 << 61) - 1


class NgramIndex:
    """Where each n-gram of one growing text ended last; gives the longest match of its current suffix.

        text   a b c d e a b c        suffix "a b c" (n = 3)
                   ^match_end         ended last at position 2, so "d" comes next

    Dictionary entries per token: one for each length, about 0.6 KB with lengths 2 to 8.
    """

    __slots__ = ("_last_end", "_lengths", "_match_end", "_match_len", "_min_match", "_tokens")

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match = min_match
        self._lengths = range(1, max_match + 1)
        self._last_end: dict[int, int] = {}
        self._tokens: list[int] = []
        self._match_len = 0
        self._match_end = -1

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def match_len(self) -> int:
        """Tokens of the longest match of the current suffix; 0: none."""
        return self._match_len

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; the match afterwards is the one of the new last position."""
        tokens, last_end, min_match = self._tokens, self._last_end, self._min_match
        for token in token_ids:
            end = len(tokens)
            tokens.append(token)
            self._match_len = 0
            key = 0
            for length in self._lengths:
                if length > end + 1:
                    break
                key = (key * _MULTIPLIER + tokens[end - length + 1] + 1) & _MASK
                if length < min_match:
                    continue
                before = last_end.get(key)
                last_end[key] = end
                if before is not None:
                    self._match_len, self._match_end = length, before

    def continuation(self, k: int) -> list[int]:
        """Up to ``k`` tokens that followed the match; empty without one.

        A match so near the end that fewer than ``k`` tokens follow it is read as a period that goes on.
        """
        length, match_end, tokens = self._match_len, self._match_end, self._tokens
        if not length or tokens[match_end - length + 1 : match_end + 1] != tokens[-length:]:
            return []
        guesses = tokens[match_end + 1 : match_end + 1 + k]
        period = len(guesses)
        while len(guesses) < k:
            guesses.append(guesses[-period])
        return guesses


@dataclass(slots=True)
class _Text:
    index: NgramIndex
    luck: Luck = field(default_factory=Luck)
    path: Path = field(default_factory=Path)


class NgramLookup:
    """See the module. ``min_match`` and ``max_match`` bound the suffix, in tokens."""

    def __init__(self, name: str, *, min_match: int, max_match: int) -> None:
        self.name = name
        self.version = f"ngram-1-{min_match}-{max_match}"
        self._min_match = min_match
        self._max_match = max_match
        self._trust = Trust()
        self._texts: dict[int, _Text] = {}

    def open(self, handle: int) -> None:
        """Start an empty index."""
        self._texts[handle] = _Text(NgramIndex(self._min_match, self._max_match))

    def guess(self, handle: int, token_ids: Sequence[int], *, prompt_len: int, scope: str, k: int) -> Weighed:
        """Index what is new, then look up the suffix."""
        text = self._texts[handle]
        index = text.index
        new = token_ids[len(index) :]
        text.path.settle(new, text.luck)
        index.extend(new)
        path, factor, length = Path(), text.luck.factor, min(index.match_len, MAX_MATCH)
        for position, token in enumerate(index.continuation(k)):
            path.add(token, self._trust.of(0, length + position, 1), 1.0, factor, 0.0)
        text.path = path
        return path.weighed()

    def close(self, handle: int) -> None:
        """Drop the index."""
        self._texts.pop(handle, None)

    def tidy(self) -> bool:
        """Nothing is kept beyond a request."""
        return False

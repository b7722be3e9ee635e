"""How far what was found can be trusted: by where it was found, and by how look-ups fared in this very text."""

from paceline.ranges import MAX_K

MAX_MATCH = 32
"""Matches are not followed further back than this."""
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_PRIOR = 8.0  # votes seen beforehand
_PRIOR_RIGHT = 0.6
_OWN_PRIOR = 4.0  # guesses that a text's own experience has to outweigh
_OWN_KEEP = 0.97
_MOST_BETTER = 1.3


class Trust:
    """How often votes were right, by where they came from: learned, shared by all sequences."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int, int], list[float]] = {}
        longest = MAX_MATCH + MAX_K
        self._bucket = [sum(length >= low for low in _LENGTHS) for length in range(longest + 1)]

    def of(self, source: int, match_len: int, votes: int) -> list[float]:
        """[votes right, shares of votes given] of such guesses."""
        key = (source, self._bucket[match_len], min(votes, 8).bit_length())
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = [_PRIOR * _PRIOR_RIGHT, _PRIOR]
        return cell


class Luck:
    """How look-ups fared in one text, against what was to be expected of them: texts differ, places do not tell."""

    __slots__ = ("_expected", "_right")

    def __init__(self) -> None:
        self._right = self._expected = _OWN_PRIOR

    @property
    def factor(self) -> float:
        """Guesses are right so many times as often as elsewhere."""
        return min(self._right / self._expected, _MOST_BETTER)

    def observe(self, expected: float, *, right: bool) -> None:
        """A guess that was right with probability ``expected``, those before it being right."""
        self._right += (1.0 - _OWN_KEEP) * (_OWN_PRIOR - self._right) + right
        self._expected += (1.0 - _OWN_KEEP) * (_OWN_PRIOR - self._expected) + expected

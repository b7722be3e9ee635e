"""How far what was found can be trusted: by where it was found, and by how look-ups fared in this very text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.lookup.base import Weighed
from paceline.ranges import MAX_K

MAX_MATCH = 32
"""Matches are not followed further back than this."""
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_PRIOR = 8.0  # votes seen beforehand
_PRIOR_RIGHT = 0.6
_OWN_PRIOR = 4.0  # guesses that a text's own experience has to outweigh
_OWN_KEEP = 0.97
_MOST_BETTER = 1.3
_SUREST = 0.99


Cell: TypeAlias = list[float]
"""[guesses right, guesses expected to be right] of one kind of guess: their ratio corrects what is expected."""


class Trust:
    """How often votes were right, by where they came from: learned, shared by all sequences."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int, int], Cell] = {}
        longest = MAX_MATCH + MAX_K
        self._bucket = [sum(length >= low for low in _LENGTHS) for length in range(longest + 1)]

    def of(self, source: int, match_len: int, votes: int) -> Cell:
        """The record of such guesses; a share of the votes is what is expected of one."""
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


@dataclass(slots=True)
class Path:
    """Guesses one after the other, as far as they are likely enough; judged when the text has gone on."""

    token_ids: list[int] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """What is expected of each guess before its cell corrects it."""
    chances: list[float] = field(default_factory=list)
    """The same, corrected: given that those before it are right."""
    probabilities: list[float] = field(default_factory=list)
    """That a guess and all before it are right, with the luck of this text."""
    worth: float = 0.0
    """Guesses expected to be right."""

    def add(self, token_id: int, cell: Cell, share: float, factor: float, bar: float) -> bool:
        """One more guess, unless the path gets less likely than ``bar``; whether it was added."""
        chance = share * cell[0] / cell[1]
        # A text's luck scales odds: chances times a luck above 1 would stay at certainty, however deep the path.
        sure = min(chance, _SUREST)
        probability = self.probabilities[-1] if self.probabilities else 1.0
        probability *= sure * factor / (1.0 - sure + sure * factor)
        if probability < bar:
            return False
        self.token_ids.append(token_id)
        self.cells.append(cell)
        self.shares.append(share)
        self.chances.append(chance)
        self.probabilities.append(probability)
        self.worth += probability
        return True

    def settle(self, new: Sequence[int], luck: Luck) -> None:
        """Learn from the tokens that came: each guess counts whose predecessors were right."""
        for guess, cell, share, chance, token in zip(
            self.token_ids, self.cells, self.shares, self.chances, new, strict=False
        ):
            cell[1] += share
            luck.observe(min(chance, 1.0), right=guess == token)
            if guess != token:
                break
            cell[0] += 1.0

    def weighed(self) -> Weighed:
        """The guesses as others see them."""
        return Weighed(self.token_ids, self.probabilities)

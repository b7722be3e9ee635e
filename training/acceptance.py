"""What the drafter would have accepted: the one figure that decides.

At temperature 0 the verifier keeps a guess when it is the target's own next token, and all that the drafter has read
before an accepted guess is the target's own text. So agreement, position by position along stored greedy answers,
says exactly what serving would accept; no drafting loop is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Acceptance:
    """Counts over rounds of ``k`` guesses."""

    k: int = 4
    rounds: int = 0
    tokens: int = 0
    agreed: int = 0
    positions: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, agreement: Sequence[bool]) -> None:
        """One answer: whether the drafter agrees at each of its positions."""
        self.agreed += sum(agreement)
        self.positions += len(agreement)
        at = 0
        while at < len(agreement):
            asked = list(agreement[at : at + self.k])
            hits = asked.index(False) if False in asked else len(asked)
            at += self.add_round(hits, len(asked), len(agreement) - at)

    def add_round(self, hits: int, asked: int, left: int) -> int:
        """One round: ``hits`` of ``asked`` guesses kept, ``left`` tokens of the answer to come; the tokens it made."""
        self.reached = self.reached or [0] * self.k
        self.accepted = self.accepted or [0] * self.k
        for position in range(min(hits + 1, asked)):
            self.reached[position] += 1
            self.accepted[position] += position < hits
        made = min(hits + 1, left)
        self.rounds += 1
        self.tokens += made
        return made

    @property
    def mean_length(self) -> float:
        """Tokens a round, bonus included."""
        return self.tokens / max(self.rounds, 1)

    @property
    def agreement(self) -> float:
        """Share of positions at which the guess is right."""
        return self.agreed / max(self.positions, 1)

    @property
    def by_position(self) -> list[float]:
        """Share accepted at each position of those that reached it."""
        return [a / max(r, 1) for a, r in zip(self.accepted, self.reached, strict=True)]

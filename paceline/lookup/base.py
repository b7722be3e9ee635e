"""What a look-up is: guesses from text alone, each with the probability that it and all before it are right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Weighed:
    """Guesses, and for each of them the probability that it and all before it are right."""

    token_ids: list[int]
    probabilities: list[float]


class Lookup(Protocol):
    """Guesses for many texts. All methods are called from one thread. Some ten microseconds a question."""

    @property
    def name(self) -> str:
        """The name of the drafter that it is."""

    @property
    def version(self) -> str:
        """Of its algorithm and settings: statistics are kept apart by it."""

    def open(self, handle: int) -> None:
        """Start an empty text."""

    def guess(self, handle: int, token_ids: Sequence[int], *, prompt_len: int, scope: str, k: int) -> Weighed:
        """Up to ``k`` guesses on how ``token_ids`` goes on; within the life of a handle these only grow.

        The first ``prompt_len`` of them are prompt. What is remembered of a text serves texts of the same ``scope`` only, and
        none where it is empty.
        """

    def close(self, handle: int) -> None:
        """The text is over. Never raises."""

    def tidy(self) -> bool:
        """Do a piece of the work that can wait (under 0.1 ms); whether there is more."""

"""A drafter that says what it is told: for tests of whatever stands around a drafter."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.errors import CapacityError
from paceline.types import SamplingParams


class Request(Protocol):
    """The part of a draft request that a script may look at (see ``draft_service.drafters.base``)."""

    @property
    def handle(self) -> int:
        """Names the sequence."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and confirmed output."""

    @property
    def prompt_len(self) -> int:
        """How many of them are prompt."""

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""

    @property
    def k(self) -> int:
        """Most guesses."""

    @property
    def vocab_size(self) -> int:
        """Guesses lie below it."""


Script = Callable[[Request], "list[int] | None"]


class ScriptedDrafter:
    """Gives ``script(request)`` for each request; whatever the script raises, ``propose`` raises.

    ``hang`` stops ``propose`` before it answers until ``let_go``; ``opened`` holds the handles open now, ``batches``
    the handles of every batch asked for. ``capacity``: most sequences open at the same time; 0: any number.
    """

    def __init__(
        self,
        script: Script,
        *,
        name: str = "scripted",
        capacity: int = 0,
        max_context: int = 0,
        slow: bool = False,
    ) -> None:
        self.script = script
        self.name = name
        self.version = "scripted-1"
        self.max_context = max_context
        self.slow = slow
        self.capacity = capacity
        self.opened: set[int] = set()
        self.batches: list[tuple[int, ...]] = []
        self.hanging = threading.Event()
        self._go = threading.Event()
        self._go.set()

    def hang(self) -> None:
        """From now on ``propose`` does not come back; ``hanging`` is set while it is in there."""
        self._go.clear()

    def let_go(self) -> None:
        """End ``hang``."""
        self._go.set()

    def open(self, handle: int) -> None:
        """Take a place. Raises CapacityError when there is none."""
        if self.capacity and len(self.opened) >= self.capacity:
            raise CapacityError(f"all {self.capacity} places are taken", 1.0)
        self.opened.add(handle)

    def propose(self, batch: Sequence[Request]) -> list[list[int] | None]:
        """What the script says."""
        self.batches.append(tuple(request.handle for request in batch))
        self.hanging.set()
        self._go.wait()
        self.hanging.clear()
        return [self.script(request) for request in batch]

    def close(self, handle: int) -> None:
        """Give the place back."""
        self.opened.discard(handle)

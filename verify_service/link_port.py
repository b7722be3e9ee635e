"""What the engine thread and a link to a draft replica say to each other: values, and where they are written."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from paceline.link import Lookahead, Stamp
from paceline.types import DraftDistribution
from verify_service.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's answer; empty ``token_ids``: no guess. ``residence_s``: how long it was on the draft replica.

    ``distributions`` say what each token was drawn from, under the sampled laws; none: nothing was drawn.
    ``assumed_ids``: drafted ahead, for the case that just these are committed. ``draft_s`` is the drafter's whole work.
    """

    stamp: Stamp
    token_ids: list[int]
    residence_s: float
    distributions: tuple[DraftDistribution, ...] = ()
    draft_s: float = 0.0
    assumed_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """A drafter of a draft replica. ``shared``: it computes on the cores that the target model needs."""

    version: str
    max_context: int = 0  # tokens, 0 for no limit
    max_level: int = 0
    one_pass: bool = False
    shared: bool = True
    prompt_tokens: int = 0  # of a prompt it reads only the last so many; 0: all


class Refusal(Enum):
    """Why a drafter does not mirror a sequence."""

    RESYNC = "resync"  # opening anew helps
    LATER = "later"  # no room now
    FINAL = "final"  # it will not, on this link


class LinkPort(Protocol):
    """Where entries for one draft replica are written; ``flush`` sends them as one message."""

    endpoint: str

    def open(self, sequence: Sequence, epoch: int, k: int, lookahead: Lookahead) -> None:
        """Mirror the sequence from now on; up to ``k`` guesses are asked for."""

    def commit(
        self, stamp: Stamp, token_ids: list[int], k: int, round_index: int, lookahead: Lookahead
    ) -> None:
        """Tokens were committed behind ``stamp.base_len``; up to ``k`` guesses are asked for."""

    def close(self, sequence_id: int, epoch: int) -> None:
        """Forget the sequence."""

    def flush(self) -> None:
        """Send what was written since the last flush."""

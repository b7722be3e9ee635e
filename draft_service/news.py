"""What the event loop and a drafters' thread tell each other: news of sequences one way, answers the other."""

from collections.abc import Callable
from dataclasses import dataclass

from draft_service.refusal import RefusalReason
from paceline.link import NO_LOOKAHEAD, Lookahead
from paceline.types import DraftDistribution, Law, SamplingParams


@dataclass(frozen=True, slots=True)
class Question:
    """Up to ``k`` (>= 1) guesses are wanted. ``round_index`` and ``arrived`` (monotonic) come back with the answer.

    ``lookahead``: what to draft ahead of the verdict on them.
    """

    k: int
    round_index: int
    arrived: float
    lookahead: Lookahead = NO_LOOKAHEAD


@dataclass(frozen=True, slots=True)
class Drafted:
    """Guesses after ``base_len`` tokens. ``started`` is monotonic; ``draft_s`` is shared with the batch.

    With ``assumed_ids`` they were drafted ahead, in part at least, and come behind those. ``pushed``: before any verdict; the
    question then is one of our own.
    """

    handle: int
    base_len: int
    token_ids: list[int]
    question: Question
    started: float
    draft_s: float
    distributions: tuple[DraftDistribution, ...] = ()
    assumed_ids: tuple[int, ...] = ()
    pushed: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker has dropped this sequence."""

    handle: int
    reason: RefusalReason
    message: str


@dataclass(frozen=True, slots=True)
class Taken:
    """The verifier has taken a block that was pushed at monotonic ``ended``: nothing goes over the link, but it is told in traces."""

    handle: int
    block: Drafted
    ended: float


Answer = Drafted | Refused | Taken
Deliver = Callable[[list[Answer]], None]
"""Takes answers; called on the worker thread, must neither block nor raise."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Which sequence of which verify replica, in the records of both tiers."""

    verify_id: str
    sequence_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Open:
    """Copy this sequence from now on."""

    handle: int
    drafter: str
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    vocab_size: int
    question: Question | None
    deliver: Deliver
    scope: str = ""
    law: Law = Law.COUPLED
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Extend:
    """Tokens were committed; ``question`` replaces the one before it, None takes it back."""

    handle: int
    token_ids: list[int]
    question: Question | None


@dataclass(frozen=True, slots=True)
class Close:
    """Forget this sequence."""

    handle: int


@dataclass(frozen=True, slots=True)
class Alone:
    """The slower half of this sequence's drafter has dropped it: the quick half goes on without (see ``relay``)."""

    handle: int


Event = Open | Extend | Close | Alone

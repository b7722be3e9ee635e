"""What a round verifies, and how it came to be."""

from dataclasses import dataclass

from paceline.types import DraftDistribution, ProposalOutcome


@dataclass(frozen=True, slots=True)
class Block:
    """Guesses for one round. ``asked_at``/``answered_at`` are monotonic, 0 without an answer."""

    token_ids: list[int]
    outcome: ProposalOutcome
    drafter: str = ""
    asked_at: float = 0.0
    answered_at: float = 0.0
    residence_s: float = 0.0
    distributions: tuple[DraftDistribution, ...] = ()
    work_s: float = 0.0
    ahead_level: int = 0
    ahead_hit: bool = False
    read_prompt: bool = False  # the drafter had the whole sequence to read first, so its time says nothing
    beside: bool = False  # looked up beside the target, at the time when a question would have been sent
    found: int = 0  # so many guesses were looked up, some of which may have been cut since
    instead: ProposalOutcome | None = (
        None  # of the draft tier's answer, where what was looked up stands in for it
    )
    survival: tuple[float, ...] | None = None
    """Where the drafter says so: the probability of each guess that it and all before it are right."""


PLAIN = Block([], ProposalOutcome.NONE)

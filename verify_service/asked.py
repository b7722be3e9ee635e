"""What is known of a connected draft replica, and of one sequence that it mirrors. ``drafts`` alone changes them."""

from dataclasses import dataclass, field

from paceline.link import NO_LOOKAHEAD, Lookahead, ProposalGate, Stamp
from verify_service.arrears import Arrears
from verify_service.breaker import Breaker
from verify_service.link_port import LinkPort, Offer, Proposal
from verify_service.pace import Pace
from verify_service.sequence import Sequence


@dataclass(slots=True, eq=False)
class Link:
    """A draft replica that is connected."""

    port: LinkPort
    drafters: dict[str, Offer]
    pace: dict[str, Pace]  # of each drafter
    breaker: Breaker = field(default_factory=Breaker)
    arrears: Arrears = field(default_factory=Arrears)
    sequences: set[int] = field(default_factory=set)
    probe: int | None = None

    @property
    def trusted(self) -> bool:
        """Whether rows may wait for it."""
        return not (self.breaker.is_open or self.arrears.owes)


@dataclass(slots=True, eq=False)
class Asked:
    """What is known of one speculative sequence on the link."""

    sequence: Sequence
    gate: ProposalGate = field(default_factory=ProposalGate)
    link: Link | None = None
    refused_by: set[str] = field(default_factory=set)
    not_before: dict[str, float] = field(
        default_factory=dict
    )  # endpoints that had no room: when to ask again
    asked_at: float = 0.0
    k: int = 0  # guesses asked for last, waited for or not
    answer: Proposal | None = None
    answered_at: float = 0.0
    wait: bool = True  # for the answer to what was asked last
    doubted: bool = (
        False  # it would be waited for, if the link or the reading of this sequence were not behind
    )
    behind: bool = False  # the drafter still reads what it was opened with
    mirrored: int = 0  # tokens that the mirror has been told
    look: Stamp | None = (
        None  # a question that is not waited for: its answer is compared with what is committed meanwhile
    )
    looked: list[int] | None = None  # the answer,
    look_k: int = 0  # guesses asked for,
    look_reads: int = 0  # what the drafter had to read for it,
    look_s: float = 0.0  # and its work
    checks: bool = False  # whether the drafter is back, rather than what its guess would be worth
    reads_prompt: bool = True  # the drafter reads all of the sequence before it answers
    answered: bool = False  # anything, since the sequence was opened
    lookahead: Lookahead = NO_LOOKAHEAD  # what may be drafted ahead of the next verdict
    last_lookahead: Lookahead = NO_LOOKAHEAD  # what could be drafted ahead of the last one
    kept: dict[tuple[int, ...], tuple[Proposal, float]] = field(default_factory=dict)
    """Blocks drafted ahead, by the outcome that they assume, and when they came."""

    @property
    def asks(self) -> bool:
        """Whether a question is out that nobody waits for."""
        return self.look is not None and self.looked is None

    @property
    def pace(self) -> Pace | None:
        return self.link.pace[self.sequence.spec.plan.drafter] if self.link else None


def answers_look(asked: Asked, proposal: Proposal) -> bool:
    """Whether it is what was asked without waiting, perhaps drafted ahead of the outcome that came."""
    look, stamp = asked.look, proposal.stamp
    if look is None or stamp.epoch != look.epoch:
        return False
    since = tuple(asked.sequence.tokens[stamp.base_len : look.base_len])
    return stamp.base_len <= look.base_len and since == proposal.assumed_ids

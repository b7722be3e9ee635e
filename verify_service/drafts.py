"""The verify side of the link: which drafter mirrors which sequence, what was asked, the freshest valid block.

Everything here runs on the engine thread and does no I/O: ``link_client`` sends what is written into a ``LinkPort``
and hands in what arrived. A proposal is a hint (I1): whatever a drafter does here costs time and nothing else.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from paceline.link import Fate, ProposalGate, Stamp
from paceline.types import DraftDistribution, Mode, ProposalOutcome
from verify_service.breaker import Breaker
from verify_service.distributions import Fault, fault_of
from verify_service.sequence import Sequence

MIRROR_LAG = 32  # tokens that a mirror may lag behind while nothing is asked
RETRY_S = 1.0  # between two tries to open a sequence on replicas that had no room


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's answer; empty ``token_ids``: no guess. ``residence_s``: how long it was on the draft replica.

    ``distributions`` say what each token was drawn from, under the sampled laws; none: nothing was drawn.
    """

    stamp: Stamp
    token_ids: list[int]
    residence_s: float
    distributions: tuple[DraftDistribution, ...] = ()


class Refusal(Enum):
    """Why a drafter does not mirror a sequence."""

    RESYNC = "resync"  # opening anew helps
    LATER = "later"  # no room now
    FINAL = "final"  # it will not, on this link


class LinkPort(Protocol):
    """Where entries for one draft replica are written; ``flush`` sends them as one message."""

    endpoint: str

    def open(self, sequence: Sequence, epoch: int, k: int) -> None:
        """Mirror the sequence from now on; up to ``k`` guesses are asked for."""

    def commit(self, stamp: Stamp, token_ids: list[int], k: int, round_index: int) -> None:
        """Tokens were committed behind ``stamp.base_len``; up to ``k`` guesses are asked for."""

    def close(self, sequence_id: int, epoch: int) -> None:
        """Forget the sequence."""

    def flush(self) -> None:
        """Send what was written since the last flush."""


@dataclass(slots=True, eq=False)
class Link:
    """A draft replica that is connected."""

    port: LinkPort
    drafters: dict[str, str]  # name -> version
    max_context: dict[str, int]  # name -> tokens, 0 for no limit
    breaker: Breaker = field(default_factory=Breaker)
    sequences: set[int] = field(default_factory=set)
    probe: int | None = None


@dataclass(slots=True, eq=False)
class _Asked:
    """What is known of one speculative sequence on the link."""

    sequence: Sequence
    gate: ProposalGate = field(default_factory=ProposalGate)
    link: Link | None = None
    refused_by: set[str] = field(default_factory=set)
    not_before: dict[str, float] = field(
        default_factory=dict
    )  # endpoints that had no room: when to ask again
    asked_at: float = 0.0
    answer: Proposal | None = None
    answered_at: float = 0.0
    wait: bool = True  # for the answer to what was asked last
    mirrored: int = 0  # tokens that the mirror has been told
    look: Stamp | None = (
        None  # a question that is not waited for: its answer is compared with what is committed meanwhile
    )
    looked: list[int] | None = None  # the answer


@dataclass(frozen=True, slots=True)
class Block:
    """What a round verifies, and how it came. ``asked_at``/``answered_at`` are monotonic, 0 without an answer."""

    token_ids: list[int]
    outcome: ProposalOutcome
    drafter: str = ""
    asked_at: float = 0.0
    answered_at: float = 0.0
    residence_s: float = 0.0
    distributions: tuple[DraftDistribution, ...] = ()


_PLAIN = Block([], ProposalOutcome.NONE)


class Drafts:
    """All links and all speculative sequences of a verify replica."""

    def __init__(self, *, vocab_size: int, wait_s: float, clock: Callable[[], float]) -> None:
        self._vocab_size = vocab_size
        self._wait_s = wait_s
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._asked: dict[int, _Asked] = {}
        self.fates: Counter[Fate] = Counter()
        self.faults: Counter[Fault] = Counter()
        """Blocks left aside under a sampled law because of their distributions."""
        self.known: dict[str, str] = {}  # drafter -> version, of every link ever up

    # --- what the links report ------------------------------------------------------------------------------

    def link_up(self, port: LinkPort, drafters: dict[str, str], max_context: dict[str, int]) -> None:
        """A draft replica is connected, perhaps again: a new process, so its breaker starts closed."""
        self.link_down(port.endpoint)
        self._links[port.endpoint] = Link(port, drafters, max_context)
        self.known.update(drafters)

    def link_down(self, endpoint: str) -> None:
        """A draft replica is gone: its sequences go on plainly until another one takes them."""
        link = self._links.pop(endpoint, None)
        if link is None:
            return
        for sequence_id in link.sequences:
            asked = self._asked[sequence_id]
            asked.link = None
            asked.look = asked.looked = None
            asked.refused_by.discard(endpoint)
        for asked in self._asked.values():
            asked.refused_by.discard(endpoint)

    def proposed(self, endpoint: str, proposals: Iterable[Proposal], at: float) -> None:
        """Proposals arrived at monotonic time ``at``."""
        link = self._links.get(endpoint)
        for proposal in proposals:
            asked = self._asked.get(proposal.stamp.sequence_id)
            if link is None or asked is None or asked.link is not link:
                self.fates[Fate.STALE] += 1
                continue
            if proposal.stamp == asked.look:
                asked.looked = proposal.token_ids
                link.breaker.answered()
                link.probe = None
                continue
            fate = asked.gate.judge(proposal.stamp, proposal.token_ids, self._vocab_size)
            self.fates[fate] += 1
            if fate is Fate.APPLY:
                asked.answer, asked.answered_at = self._sound(proposal, asked.sequence), at
                link.breaker.answered()
                link.probe = None

    def _sound(self, proposal: Proposal, sequence: Sequence) -> Proposal:
        """The proposal, or an empty answer where it does not say rightly what its tokens were drawn from."""
        if not (sequence.law.sampled and proposal.distributions):
            return proposal
        fault = fault_of(proposal.token_ids, proposal.distributions, self._vocab_size)
        if fault is None:
            return proposal
        self.faults[fault] += 1
        return Proposal(proposal.stamp, [], proposal.residence_s)

    def refused(self, endpoint: str, sequence_id: int, epoch: int, reason: Refusal) -> None:
        """A draft replica does not mirror a sequence (any more)."""
        asked = self._asked.get(sequence_id)
        if asked is None or asked.link is not self._links.get(endpoint) or asked.gate.epoch != epoch:
            self.fates[Fate.STALE] += 1
            return
        self._detach(asked)
        if reason is Refusal.FINAL:
            asked.refused_by.add(endpoint)
        elif reason is Refusal.LATER:
            asked.not_before[endpoint] = self._clock() + RETRY_S

    def available(self) -> set[str]:
        """Drafters that some connected replica offers."""
        return {name for link in list(self._links.values()) for name in link.drafters}

    # --- what the step asks -----------------------------------------------------------------------------------

    def awaiting(self, sequence: Sequence, now: float) -> float | None:
        """Until when (monotonic) the sequence may wait for a proposal; None: there is nothing to wait for."""
        asked = self._asked.get(sequence.id)
        if asked is None or asked.link is None or not asked.wait or not asked.gate.awaiting:
            return None
        limit = asked.asked_at + self._wait_s
        return limit if now < limit else None

    def take(self, sequence: Sequence, now: float) -> Block:
        """The block that the sequence's round verifies; a proposal that should be here and is not counts as missed."""
        if sequence.spec.plan.mode is Mode.PLAIN:
            return _PLAIN
        drafter = sequence.spec.plan.drafter
        asked = self._asked.get(sequence.id)
        if asked is not None and not asked.wait:
            return Block([], ProposalOutcome.NONE, drafter)
        if asked is None or asked.link is None:
            return Block([], ProposalOutcome.UNAVAILABLE, drafter)
        if asked.gate.k == 0:
            return Block([], ProposalOutcome.NONE, drafter)
        if asked.answer is None:
            self._missed(asked.link, now)
            return Block([], ProposalOutcome.LATE, drafter)
        answer, asked.answer = asked.answer, None
        return Block(
            answer.token_ids,
            ProposalOutcome.USED if answer.token_ids else ProposalOutcome.EMPTY,
            drafter,
            asked.asked_at,
            asked.answered_at,
            answer.residence_s,
            answer.distributions if sequence.law.sampled else (),
        )

    def advance(self, sequence: Sequence, num_committed: int, k: int, *, wait: bool = True) -> None:
        """Tokens were committed (the last ``num_committed`` of the sequence); ask for the next ``k``, if k > 0.

        ``wait`` False: the answer is no block; ``looked`` compares it with what is committed meanwhile. A sequence that
        asks nothing tells its mirror only now and then: a drafter reads nothing before it is asked.
        """
        if sequence.spec.plan.mode is Mode.PLAIN:
            return
        asked = self._asked.get(sequence.id)
        if asked is None:
            asked = self._asked[sequence.id] = _Asked(sequence)
        asked.answer = None
        asked.wait = wait and k > 0
        length = len(sequence.tokens)
        if k == 0 and (asked.link is None or length - asked.mirrored < MIRROR_LAG):
            if asked.link is not None:
                asked.gate.moved(length, 0)
            return
        if k and not wait and asked.link is not None and asked.look is not None and asked.looked is None:
            self._missed(asked.link, self._clock())  # the last look has not been answered in many rounds
        if asked.link is None:
            asked.link = self._attach(asked)
            if asked.link is None:
                return
            epoch = asked.gate.opened(length, k if wait else 0)
            asked.link.port.open(sequence, epoch, k)
        else:
            asked.gate.moved(length, k if wait else 0)
            stamp = Stamp(sequence.id, asked.gate.epoch, asked.mirrored)
            asked.link.port.commit(stamp, sequence.tokens[asked.mirrored :], k, sequence.stats.num_rounds)
        asked.mirrored = length
        asked.asked_at = self._clock()
        if k and not wait:
            asked.look, asked.looked = Stamp(sequence.id, asked.gate.epoch, length), None

    def looked(self, sequence: Sequence) -> tuple[int, int, int] | None:
        """What a guess that was not waited for was worth: its length, tokens compared, tokens that were right; once."""
        asked = self._asked.get(sequence.id)
        if asked is None or asked.look is None or asked.looked is None:
            return None
        guess, base = asked.looked, asked.look.base_len
        checked = min(len(guess), len(sequence.tokens) - base)
        asked.look = asked.looked = None
        agreed = 0
        while agreed < checked and guess[agreed] == sequence.tokens[base + agreed]:
            agreed += 1
        return len(guess), checked, agreed

    def pause(self, sequence: Sequence) -> None:
        """The sequence gave up its memory: its mirror goes too, and is opened under a higher epoch later."""
        asked = self._asked.get(sequence.id)
        if asked is not None and asked.link is not None:
            self._detach(asked)

    def close(self, sequence: Sequence) -> None:
        """The sequence is over."""
        asked = self._asked.pop(sequence.id, None)
        if asked is not None and asked.link is not None:
            self._detach(asked)

    def flush(self) -> None:
        """One message a link with everything since the last flush."""
        for link in self._links.values():
            link.port.flush()

    # --- links ------------------------------------------------------------------------------------------------

    def _attach(self, asked: _Asked) -> Link | None:
        drafter = asked.sequence.spec.plan.drafter
        length = len(asked.sequence.tokens)
        now = self._clock()
        offers = [
            link
            for endpoint, link in self._links.items()
            if drafter in link.drafters
            and endpoint not in asked.refused_by
            and now >= asked.not_before.get(endpoint, 0.0)
            and (not link.max_context[drafter] or length < link.max_context[drafter])
        ]
        for link in sorted(offers, key=lambda link: len(link.sequences)):
            if link.breaker.may_attach(now):
                if link.breaker.is_open:
                    link.probe = asked.sequence.id
                link.sequences.add(asked.sequence.id)
                return link
        return None

    def _detach(self, asked: _Asked) -> None:
        link = asked.link
        assert link is not None
        link.sequences.discard(asked.sequence.id)
        link.port.close(asked.sequence.id, asked.gate.epoch)
        if link.probe == asked.sequence.id:
            link.probe = None
            link.breaker.probe_ended(self._clock())
        asked.link = None
        asked.answer = None
        asked.look = asked.looked = None

    def _missed(self, link: Link, now: float) -> None:
        if not link.breaker.missed(now):
            return
        link.probe = None
        for sequence_id in list(link.sequences):
            self._detach(self._asked[sequence_id])

"""The verify side of the link: which drafter mirrors which sequence, what was asked, the freshest valid block.

Everything here runs on the engine thread and does no I/O: ``link_client`` sends what is written into a ``LinkPort``
and hands in what arrived. A proposal is a hint (I1): whatever a drafter does here costs time and nothing else.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from paceline.link import MAX_LEVEL, NO_LOOKAHEAD, Fate, Lookahead, Stamp
from paceline.types import Mode, ProposalOutcome
from verify_service.asked import Asked, Link, answers_look
from verify_service.belief import Look
from verify_service.beside import Beside
from verify_service.block import PLAIN, Block
from verify_service.distributions import Fault, fault_of
from verify_service.link_port import LinkPort, Offer, Proposal, Refusal
from verify_service.pace import Pace
from verify_service.sequence import Sequence

MIRROR_LAG = 32  # tokens that a mirror may lag behind while nothing is asked
PROBE_WAITS = 2  # times the longest wait: for so long a probe is out, which nobody waits for
RETRY_S = 1.0  # between two tries to open a sequence on replicas that had no room


class Drafts:
    """All links and all speculative sequences of a verify replica."""

    def __init__(
        self,
        *,
        vocab_size: int,
        wait_s: float,
        clock: Callable[[], float],
        least_wait_s: float = 0.03,
        fixed_lookahead: Lookahead | None = None,
        beside: Beside | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self.beside = beside or Beside({}, {}, {})
        self._fixed_lookahead = fixed_lookahead
        self._step_s = 0.0
        self._wait_s = wait_s
        self._least_wait_s = least_wait_s
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._asked: dict[int, Asked] = {}
        self.fates: Counter[Fate] = Counter()
        self.faults: Counter[Fault] = Counter()
        """Blocks left aside under a sampled law because of their distributions."""
        self.known: dict[str, str] = dict(self.beside.alone)  # drafter -> version, of every link ever up too

    # --- what the links report ------------------------------------------------------------------------------

    def link_up(self, port: LinkPort, drafters: dict[str, Offer]) -> None:
        """A draft replica is connected, perhaps again: a new process, so its breaker starts closed."""
        self.link_down(port.endpoint)
        pace = {
            name: Pace(max_level=0 if offer.shared else offer.max_level, one_pass=offer.one_pass)
            for name, offer in drafters.items()
        }
        self._links[port.endpoint] = Link(port, drafters, pace)
        self.known.update({name: offer.version for name, offer in drafters.items()})

    def link_down(self, endpoint: str) -> None:
        """A draft replica is gone: its sequences go on plainly until another one takes them."""
        link = self._links.pop(endpoint, None)
        if link is None:
            return
        for sequence_id in link.sequences:
            asked = self._asked[sequence_id]
            asked.link = None
            asked.answer = None
            asked.kept.clear()
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
            if answers_look(asked, proposal):
                asked.looked, asked.look_s = proposal.token_ids, proposal.draft_s
                self._in_touch(asked, link, at)
                continue
            fate = asked.gate.judge(
                proposal.stamp, proposal.token_ids, self._vocab_size, proposal.assumed_ids
            )
            self.fates[fate] += 1
            if fate is Fate.AHEAD:
                asked.kept[proposal.assumed_ids] = proposal, at
            elif fate is Fate.APPLY:
                self._answered(asked, proposal, at)

    def stepped(self, step_s: float) -> None:
        """A step of the engine took so long: what drafting ahead can hide behind."""
        self._step_s = step_s if not self._step_s else 0.9 * self._step_s + 0.1 * step_s

    def _sound(self, proposal: Proposal, sequence: Sequence) -> Proposal:
        """The proposal, or an empty answer where it does not say rightly what its tokens were drawn from."""
        if not (sequence.law.sampled and proposal.distributions):
            return proposal
        fault = fault_of(proposal.token_ids, proposal.distributions, self._vocab_size)
        if fault is None:
            return proposal
        self.faults[fault] += 1
        return replace(proposal, token_ids=[], distributions=())

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

    def connected(self) -> dict[str, Link]:
        """Links by endpoint; from any thread, for a glance."""
        return dict(self._links)

    def available(self) -> set[str]:
        """Drafters that some connected replica offers, or that need none."""
        return {name for link in list(self._links.values()) for name in link.drafters} | set(
            self.beside.alone
        )

    # --- what the step asks -----------------------------------------------------------------------------------

    def awaiting(self, sequence: Sequence, now: float) -> float | None:
        """Until when (monotonic) the sequence may wait for a proposal; None: there is nothing to wait for."""
        asked = self._asked.get(sequence.id)
        if asked is None or asked.link is None or not asked.wait or not asked.gate.awaiting:
            return None
        limit = asked.asked_at + self._longest_wait_s(asked)
        return limit if now < limit else None

    def expected_by(self, sequence: Sequence) -> float:
        """When (monotonic) an awaited proposal is here 19 times out of 20; infinite where nothing is known."""
        asked = self._asked.get(sequence.id)
        pace = asked.pace if asked is not None else None
        usual_s = pace.usual_wait_s() if pace is not None else None
        return math.inf if asked is None or usual_s is None else asked.asked_at + usual_s

    def _longest_wait_s(self, asked: Asked) -> float:
        """How long a row stands back for its own proposal: twice what is usual, a step at least, as many as it asks for at most.

        Never under ``least_wait_s``: where steps take a few milliseconds, the operating system alone is later than that.
        """
        usual_s = asked.pace.usual_wait_s() if asked.pace is not None else None
        if usual_s is None:
            return self._wait_s
        longest_s = max(2 * usual_s, self._step_s)
        if self._step_s:  # a block saves no more steps than it has tokens
            longest_s = min(longest_s, max(asked.k, 1) * self._step_s)
        return min(self._wait_s, max(longest_s, self._least_wait_s))

    def take(self, sequence: Sequence, now: float) -> Block:
        """The block that the sequence's round verifies: what the draft tier was asked for, else what was looked up."""
        if sequence.spec.plan.mode is Mode.PLAIN:
            return PLAIN
        found = self.beside.take(sequence)
        if sequence.spec.plan.drafter in self.beside.alone and found is not None:
            return found
        asked = self._take_asked(sequence, now)
        if found is None or asked.token_ids:
            return asked
        if asked.outcome is ProposalOutcome.NONE:
            return found
        return replace(found, instead=asked.outcome)

    def _take_asked(self, sequence: Sequence, now: float) -> Block:
        """What the draft tier answered; a proposal that should be here and is not counts as missed."""
        drafter = sequence.spec.plan.drafter
        asked = self._asked.get(sequence.id)
        if asked is not None and not asked.wait:
            outcome = ProposalOutcome.UNAVAILABLE if asked.doubted else ProposalOutcome.NONE
            return Block([], outcome, drafter)
        if asked is None or asked.link is None:
            return Block([], ProposalOutcome.UNAVAILABLE, drafter)
        if asked.gate.k == 0:
            return Block([], ProposalOutcome.NONE, drafter)
        if asked.answer is None:
            limit_s = self._longest_wait_s(asked)
            if asked.pace is not None:  # how late it would have been is not known: half as much again
                asked.pace.waited(1.5 * (now - asked.asked_at))
            if asked.reads_prompt:  # that may take long, and says nothing of what the link owes others
                asked.behind = True
            elif asked.link.arrears.missed(now, limit_s):
                self._missed(asked.link, now)
            return Block([], ProposalOutcome.LATE, drafter, read_prompt=asked.reads_prompt)
        answer, asked.answer = asked.answer, None
        hit = bool(answer.assumed_ids)
        pace = asked.pace
        if pace is not None and asked.last_lookahead.level:
            pace.looked_ahead(asked.last_lookahead, hit=hit)
        return Block(
            answer.token_ids,
            ProposalOutcome.USED if answer.token_ids else ProposalOutcome.EMPTY,
            drafter,
            asked.asked_at,
            asked.answered_at,
            min(answer.residence_s, asked.answered_at - asked.asked_at) if hit else answer.residence_s,
            answer.distributions if sequence.law.sampled else (),
            answer.draft_s,
            asked.last_lookahead.level,
            hit,
            asked.reads_prompt,
        )

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """A block of ``drafted`` guesses had so many right before the first wrong one."""
        asked = self._asked.get(sequence.id)
        pace = asked.pace if asked is not None else None
        if pace is not None and drafted:
            pace.verified(drafted, accepted)

    def advance(self, sequence: Sequence, num_committed: int, k: int, *, wait: bool = True) -> None:
        """Tokens were committed (the last ``num_committed`` of the sequence); ask for the next ``k``, if k > 0.

        ``wait`` False: the answer is no block; ``looked`` compares it with what is committed meanwhile. A sequence that
        asks nothing tells its mirror only now and then: a drafter reads nothing before it is asked.
        """
        if sequence.spec.plan.mode is Mode.PLAIN:
            return
        asked = self._asked.get(sequence.id)
        if asked is None:
            asked = self._asked[sequence.id] = Asked(sequence)
        asked.answer = None
        length = len(sequence.tokens)
        if asked.link is not None:
            self._look_after(asked, asked.link, k)
        asked.doubted = wait and k > 0 and asked.link is not None and not self._may_wait(asked, asked.link)
        wait = wait and not asked.doubted
        asked.wait = wait and k > 0
        if asked.doubted and asked.asks and length - asked.mirrored < MIRROR_LAG:
            asked.gate.moved(length, 0)  # one question at a time
            return
        # A mirror that drafts ahead has to hear of the outcome: it would take it for another one later.
        lag = 0 if asked.lookahead.level else MIRROR_LAG
        if k == 0 and (asked.link is None or length - asked.mirrored < lag):
            if asked.link is not None:
                asked.gate.moved(length, 0)
            return
        if k and not (wait or asked.doubted) and asked.link is not None and asked.asks:
            self._missed(asked.link, self._clock())  # the last look has not been answered in many rounds
        kept = None
        if asked.link is None:
            asked.link = self._attach(asked)
            if asked.link is None:
                return
            asked.behind = asked.answered = False
            if wait and not asked.link.trusted:  # a probe
                asked.wait = wait = False
                asked.doubted = True
            lookahead = self._lookahead(asked, k if wait else 0)
            asked.last_lookahead, asked.lookahead = NO_LOOKAHEAD, lookahead
            epoch = asked.gate.opened(length, k if wait else 0, lookahead.credit(k))
            asked.link.port.open(sequence, epoch, k, lookahead)
            asked.asked_at = self._clock()
            asked.reads_prompt = True
        else:
            lookahead = self._lookahead(asked, k if wait else 0)
            asked.last_lookahead, asked.lookahead = asked.lookahead, lookahead
            committed = sequence.tokens[asked.mirrored :]
            kept, asked.kept = asked.kept.get(tuple(committed)), {}
            hit = asked.gate.moved(length, k if wait else 0, committed, lookahead.credit(k))
            stamp = Stamp(sequence.id, asked.gate.epoch, asked.mirrored)
            asked.link.port.commit(stamp, committed, k, sequence.stats.num_rounds, lookahead)
            asked.asked_at = self._clock()
            asked.reads_prompt = asked.reads_prompt and not asked.answered
            if hit and kept is not None:
                self._answered(asked, *kept)
        unread = self._unread(sequence, 0 if asked.reads_prompt else asked.mirrored)
        asked.mirrored = length
        asked.k = k
        if k and not wait:
            asked.look_k, asked.look_reads, asked.look_s = k, unread, 0.0
            asked.look, asked.looked = Stamp(sequence.id, asked.gate.epoch, length), None
            asked.checks = asked.doubted
            if kept is not None:  # drafted ahead of this outcome: the drafter will not say it again
                asked.looked = kept[0].token_ids

    def unread(self, sequence: Sequence) -> int:
        """Tokens of the sequence that its drafter would have to read before it can guess."""
        asked = self._asked.get(sequence.id)
        return self._unread(sequence, asked.mirrored if asked is not None and asked.link is not None else 0)

    def _unread(self, sequence: Sequence, known: int) -> int:
        """Of a sequence whose first ``known`` tokens the drafter has."""
        prompt_len, drafter = len(sequence.spec.prompt_ids), sequence.spec.plan.drafter
        if known < prompt_len:
            offers = (link.drafters.get(drafter) for link in self._links.values())
            read = [offer.prompt_tokens or prompt_len for offer in offers if offer is not None]
            known = max(known, prompt_len - max(read, default=prompt_len))
        return len(sequence.tokens) - known

    def looked(self, sequence: Sequence) -> Look | None:
        """What a guess that was not waited for was worth, cut to what was asked for; once."""
        asked = self._asked.get(sequence.id)
        if asked is None or asked.look is None or asked.looked is None or asked.checks:
            return None
        guess, base = asked.looked[: asked.look_k], asked.look.base_len
        checked = min(len(guess), len(sequence.tokens) - base)
        asked.look = asked.looked = None
        agreed = 0
        while agreed < checked and guess[agreed] == sequence.tokens[base + agreed]:
            agreed += 1
        return Look(len(guess), checked, agreed, asked.look_reads, asked.look_s)

    def _answered(self, asked: Asked, proposal: Proposal, at: float) -> None:
        """The proposal is the answer to the question at the live length, cut to what that asked for."""
        link, pace = asked.link, asked.pace
        assert link is not None, "only what was asked on a link is answered"
        assert pace is not None, "the link offered the drafter"
        proposal = self._sound(proposal, asked.sequence)
        k = asked.gate.k
        asked.answer = (
            proposal
            if len(proposal.token_ids) <= k
            else replace(proposal, token_ids=proposal.token_ids[:k], distributions=proposal.distributions[:k])
        )
        asked.answered_at = max(at, asked.asked_at)
        asked.answered, asked.behind = True, False
        if not asked.reads_prompt:
            pace.waited(asked.answered_at - asked.asked_at)
        if proposal.assumed_ids:
            pace.drafted_ahead(asked.last_lookahead, len(proposal.token_ids), proposal.draft_s)
        else:
            pace.drafted(
                len(proposal.token_ids),
                proposal.draft_s,
                asked.answered_at - asked.asked_at - proposal.residence_s,
            )
        link.arrears.settle()
        link.breaker.answered()
        link.probe = None

    # --- a link that is not waited for ------------------------------------------------------------------------

    def _may_wait(self, asked: Asked, link: Link) -> bool:
        """Not for a link that owes an answer or is on probation, nor for a drafter that still reads the sequence."""
        return link.trusted and not asked.behind

    def _look_after(self, asked: Asked, link: Link, k: int) -> None:
        """Time has passed: what was asked may be overdue by now, and so may what the link owes."""
        now = self._clock()
        probes = link.probe == asked.sequence.id
        if asked.asks and (probes or asked.behind):
            if now - asked.asked_at >= PROBE_WAITS * self._wait_s:
                asked.asked_at = now  # one miss, not one in every round from here on
                self._missed(link, now)
        elif probes and not k:
            self._detach(asked)  # it has nothing to ask: another one may probe
        elif link.arrears.overdue(now):
            self._missed(link, now)

    def _in_touch(self, asked: Asked, link: Link, at: float) -> None:
        """An answer that was not waited for has come. A link on probation has to answer in the time that would be waited.

        The first answer after an opening says nothing about that, since the drafter had all of the sequence to read.
        """
        first, asked.answered, asked.behind = not asked.answered, True, False
        if not link.trusted:
            if first and asked.reads_prompt:
                return
            if at - asked.asked_at > self._longest_wait_s(asked):
                if link.breaker.is_open:
                    self._missed(link, self._clock())
                return
        link.arrears.settle()
        link.breaker.answered()
        link.probe = None

    def _lookahead(self, asked: Asked, k: int) -> Lookahead:
        """How far the drafter works ahead of the verdict on the next ``k`` guesses."""
        pace = asked.pace
        # A draw of the sampled laws has noise of its own, so their outcomes cannot be foreseen.
        if pace is None or k == 0 or asked.sequence.law.sampled:
            return NO_LOOKAHEAD
        if self._fixed_lookahead is not None:
            offer = asked.link.drafters[asked.sequence.spec.plan.drafter] if asked.link else None
            level = min(self._fixed_lookahead.level, offer.max_level if offer else 0)
            return Lookahead(level, self._fixed_lookahead.fan if level == MAX_LEVEL else 0)
        assert asked.link is not None
        return pace.choose(k, len(asked.link.sequences), self._step_s)

    def pause(self, sequence: Sequence) -> None:
        """The sequence gave up its memory: its mirror goes too, and is opened under a higher epoch later."""
        asked = self._asked.get(sequence.id)
        if asked is not None and asked.link is not None:
            self._detach(asked)

    def close(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self.beside.close(sequence)
        asked = self._asked.pop(sequence.id, None)
        if asked is not None and asked.link is not None:
            self._detach(asked)

    def flush(self) -> None:
        """One message a link with everything since the last flush."""
        for link in self._links.values():
            link.port.flush()

    # --- links ------------------------------------------------------------------------------------------------

    def _attach(self, asked: Asked) -> Link | None:
        drafter = asked.sequence.spec.plan.drafter
        length = len(asked.sequence.tokens)
        now = self._clock()
        offers = [
            link
            for endpoint, link in self._links.items()
            if drafter in link.drafters
            and endpoint not in asked.refused_by
            and now >= asked.not_before.get(endpoint, 0.0)
            and (not link.drafters[drafter].max_context or length < link.drafters[drafter].max_context)
        ]
        for link in sorted(offers, key=lambda link: len(link.sequences)):
            if link.breaker.may_attach(now):
                if link.breaker.is_open:
                    link.probe = asked.sequence.id
                link.sequences.add(asked.sequence.id)
                return link
        return None

    def _detach(self, asked: Asked) -> None:
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
        asked.kept.clear()

    def _missed(self, link: Link, now: float) -> None:
        if not link.breaker.missed(now):
            return
        link.probe = None
        link.arrears.settle()
        for sequence_id in list(link.sequences):
            self._detach(self._asked[sequence_id])

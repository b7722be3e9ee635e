"""Who runs: admission by free slots, who gives way, and the rows of the next step. Engine thread only."""

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from paceline.engine import SlotKV
from paceline.engine.prefix import PrefixSlots
from paceline.types import Mode
from verify_service.budget import PrefillBudget
from verify_service.drafts import Drafts
from verify_service.sequence import Sequence, State
from verify_service.waiting import WaitingLine

GATHER_SHARE = 0.25
"""Of a step's usual time: how long ready rows wait for rows whose proposal is on its way (DESIGN section 5)."""


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part in a step: a chunk of its prompt, or a round.

    ``chunk`` is the number of tokens to run that are known already; the round's draft comes on top in the step.
    """

    sequence: Sequence
    chunk: int
    is_prefill: bool


class Scheduler:
    """Admission in the order of ``waiting``; every running sequence takes part in every step, prompts under a budget."""

    def __init__(self, kv: SlotKV, drafts: Drafts, *, prefill_chunk: int) -> None:
        self._kv = kv
        self.slots = PrefixSlots(kv)
        self._drafts = drafts
        self._budget = PrefillBudget(prefill_chunk)
        self._waiting = WaitingLine()
        self._running: dict[int, Sequence] = {}
        self._gather_until = 0.0
        self._stepped_at = 0.0
        self.num_preempted = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._waiting)

    def num_decoding(self) -> tuple[int, int]:
        """Sequences past their prompt, and those of them whose plan is plain."""
        plans = [sequence.spec.plan for sequence in self._running.values() if sequence.state is State.RUNNING]
        return len(plans), sum(plan.mode is Mode.PLAIN for plan in plans)

    def sequences(self) -> Iterator[Sequence]:
        """All of them."""
        yield from self._running.values()
        yield from self._waiting

    def add(self, sequence: Sequence) -> None:
        """A new sequence."""
        self._waiting.add(sequence)

    def expired(self, now: float) -> list[Sequence]:
        """Those whose caller has stopped waiting: not worth another row of a forward."""
        return [sequence for sequence in self.sequences() if sequence.spec.deadline <= now]

    def admit(self) -> list[Sequence]:
        """Give slots to those who wait, as far as they go."""
        admitted = []
        while (first := self._waiting.first()) is not None:
            lease = self.slots.acquire(first.tokens, first.spec.tenant)
            if lease is None:
                if not self._preempt_for(first):
                    break
                continue
            sequence = self._waiting.pop()
            sequence.slot, sequence.num_cached = lease.slot, lease.reused
            sequence.state = State.PREFILL
            self._running[sequence.id] = sequence
            admitted.append(sequence)
        return admitted

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Make the youngest sequence of the lowest priority give way, if that is below ``sequence``'s.

        It goes on later from its committed tokens: nothing but time is lost (I2).
        """
        victim = min(
            self._running.values(),
            key=lambda running: (running.spec.priority, -running.admitted),
            default=None,
        )
        if victim is None or victim.spec.priority >= sequence.spec.priority:
            return False
        assert victim.slot is not None
        self._drafts.pause(victim)
        self.slots.release(victim.slot, victim.tokens)
        victim.slot = None
        victim.state = State.WAITING
        del self._running[victim.id]
        self._waiting.add(victim, in_front=True)
        self.num_preempted += 1
        return True

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """The sequence ended: its slot is free, its mirror is closed. ``keep``: what the slot holds may be reused."""
        if sequence.state is State.ENDED:
            return
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        else:
            del self._running[sequence.id]
        self._drafts.close(sequence)
        if sequence.slot is not None:
            if keep:
                self.slots.release(sequence.slot, sequence.tokens)
            else:
                self.slots.discard(sequence.slot)
            sequence.slot = None
        sequence.state = State.ENDED

    def stepped(self, work: SequenceOf[Work], ended: float, step_s: float) -> None:
        """A step is over: how long the next one may gather rows, and how much prompt it may hold, follow from it."""
        self._stepped_at = ended
        self._gather_until = ended + GATHER_SHARE * step_s
        prompt_tokens = sum(item.chunk for item in work if item.is_prefill)
        self._budget.observe(step_s, prompt_tokens, decodes=any(not item.is_prefill for item in work))

    def next(self, now: float) -> tuple[list[Work], float | None]:
        """The next step's rows; none: look again at the given time, or (None) when something arrives.

        A row whose proposal is awaited is left out rather than holding up the others: it takes part as soon as its
        proposal is here, or plainly when its own time is up. Ready rows wait for such rows only for a fraction of a
        step, since two half-full steps cost almost two full ones, and only while more is won than lost (``_gather``).
        """
        work: list[Work] = []
        earliest: float | None = None
        expected: list[float] = []
        decoding = sum(sequence.state is State.RUNNING for sequence in self._running.values())
        waiting = len(self._running) - decoding + len(self._waiting)
        budget = self._budget.tokens(decoding=decoding, waiting=waiting)
        for sequence in self._running.values():
            if sequence.state is State.PREFILL:
                assert sequence.slot is not None
                chunk = min(len(sequence.tokens) - self._kv.length(sequence.slot), budget)
                budget -= chunk
                if chunk:
                    work.append(Work(sequence, chunk, is_prefill=True))
                continue
            until = self._drafts.awaiting(sequence, now)
            if until is None:
                work.append(Work(sequence, 1, is_prefill=False))
            else:
                earliest = until if earliest is None else min(earliest, until)
                expected.append(self._drafts.expected_by(sequence))
        if work and earliest is not None:
            gather_until = self._gather(now, len(work), expected)
            if now < gather_until:
                return [], min(earliest, gather_until)
        return work, None if work else earliest

    def _gather(self, now: float, num_ready: int, expected: SequenceOf[float]) -> float:
        """Until when ready rows wait for rows whose proposals are usually here by ``expected``.

        Never longer than a quarter of a step, nor longer than it usually takes. Waiting w out of a step s costs the ready
        rows w each; the others join this step rather than stand by while it runs, and win s - w each.
        """
        until = self._gather_until
        left_s = until - now
        if left_s <= 0:
            return until
        timely = [at for at in expected if at <= until]
        known = [at for at in expected if at < math.inf]
        if known:
            if not timely:
                return now
            until = max(timely)
            left_s = max(0.0, until - now)
        coming = len(timely) if known else len(expected)
        step_s = (self._gather_until - self._stepped_at) / GATHER_SHARE
        return until if coming * (step_s - left_s) > num_ready * left_s else now

"""What another drafter, another k or another controller would have done on recorded traffic, without the target.

Under the coupled law the committed text does not depend on the drafter. So recorded tokens stand for the target, and all
else is the real thing: drafters, the verify tier's end of the link (``Drafts``), its controller (``Steering``), its verdict.
Rounds come out exactly as they would have, wherever time decides nothing: for every drafter that answers the same to the
same question, with k fixed by the request. Where time decides (the controller, a cascade), it is virtual: steps take
what the recorded cost table says, drafting takes what it takes here.

Requests begin in the recorded order: each after those, and beside those, that it was recorded after and beside. That is
what a drafter that remembers (suffix) goes by.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from draft_service.drafters import Drafter, prompt_tokens
from evaluation.direct_link import DirectLink, VirtualClock
from evaluation.recordings import Recorded, Recording, Round
from paceline.engine import Segment
from paceline.types import Mode, Plan, SpeculativeStats, Timings
from verify_service import controller
from verify_service.beside import Beside
from verify_service.block import Block
from verify_service.costs import CostTable
from verify_service.drafts import Drafts
from verify_service.link_port import Offer
from verify_service.scheduler import Work
from verify_service.sequence import DecodeSpec, State
from verify_service.sequence import Sequence as Decoding
from verify_service.steering import Policy, Steering
from verify_service.step import Outcome, Row, cut, outcome_of, tell_drafters
from verify_service.verdict import Verdict, judge

_PREFILL_CHUNK = 256
_NO_TOKEN = -1

PlanOf = Callable[[Recorded], Plan]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of one request. ``timings`` are virtual."""

    request_id: str
    rounds: tuple[Round, ...]
    stats: SpeculativeStats
    timings: Timings
    complete: bool


@dataclass(slots=True)
class _Going:
    """A request that is being replayed."""

    recorded: Recorded
    sequence: Decoding
    rounds: list[Round] = field(default_factory=list)

    def target(self, num_tokens: int) -> list[int]:
        """The recorded tokens from here on; where the recording ends, tokens that no guess equals."""
        at = self.sequence.num_generated
        known = list(self.recorded.output_ids[at : at + num_tokens])
        return known + [_NO_TOKEN] * (num_tokens - len(known))

    @property
    def left(self) -> int:
        """Recorded tokens that are still to come."""
        return len(self.recorded.output_ids) - self.sequence.num_generated


class Replay:
    """One verify replica with its drafters, on one recording. ``run`` once: drafters remember.

    ``beside``: the look-ups beside the target (``build_beside``); without, all drafters are asked over the link. ``plan_of``
    says how each request is decoded; the law is coupled whatever it says. ``policy`` chooses k where the plan does not fix it.
    """

    def __init__(
        self,
        recording: Recording,
        drafters: Mapping[str, Drafter],
        plan_of: PlanOf,
        *,
        beside: Beside | None = None,
        clock: VirtualClock | None = None,
        policy: Policy = controller,
    ) -> None:
        self._recording = recording
        self._plan_of = plan_of
        self._clock = clock or VirtualClock()
        self._table = recording.costs or CostTable(((1, ((1, 0.010), (2, 0.011), (9, 0.022))),))
        self._drafts = Drafts(
            vocab_size=recording.vocab_size, wait_s=3600.0, clock=self._clock, beside=beside
        )
        self._steering = Steering(self._table, policy=policy)
        self._link = DirectLink(drafters, recording.vocab_size)
        self._drafts.link_up(
            self._link,
            {
                name: Offer(
                    drafter.version,
                    drafter.max_context,
                    prompt_tokens=prompt_tokens(drafter),
                )
                for name, drafter in drafters.items()
            },
        )
        self._num_begun = 0

    def run(self) -> list[Replayed]:
        """All requests that can be replayed, in the recorded order."""
        waiting = deque(one for one in self._recording.requests if one.replayable)
        going: list[_Going] = []
        done: dict[int, Replayed] = {}
        order = {id(one): number for number, one in enumerate(waiting)}
        while waiting or going:
            begun: list[_Going] = []
            while waiting and all(one.recorded.ended_s > waiting[0].began_s for one in (*going, *begun)):
                begun.append(self._begin(waiting.popleft()))
            self._step(going, begun)
            going += begun
            for one in [one for one in going if not one.left]:
                done[order[id(one.recorded)]] = _result(one)
                going.remove(one)
            if not going:
                self._idle()
        return [done[number] for number in sorted(done)]

    def _idle(self) -> None:
        """What the engine does while it has nothing else to do."""
        while self._drafts.beside.tidy():
            pass

    # --- one step, as ``Engine`` and ``run_step`` take it --------------------------------------------------------

    def _begin(self, recorded: Recorded) -> _Going:
        self._num_begun += 1
        spec = DecodeSpec(
            recorded.request_id,
            recorded.prompt_ids,
            recorded.output_ids[: recorded.resumed],
            recorded.sampling,
            recorded.max_tokens,
            frozenset(),
            replace(self._plan_of(recorded), law=None),
            tenant=recorded.scope,
        )
        now = self._clock.now
        sequence = Decoding(self._num_begun, spec, lambda event: None, arrived=now, slot=0, admitted=now)
        return _Going(recorded, sequence)

    def _step(self, going: Sequence[_Going], begun: Sequence[_Going]) -> None:
        started, context = self._clock.now, self._recording.max_context
        work = [Work(one.sequence, 1, is_prefill=False) for one in going]
        work += [
            Work(one.sequence, min(len(one.sequence.tokens), _PREFILL_CHUNK), is_prefill=True)
            for one in begun
        ]
        blocks: list[Block | None] = [
            cut(self._drafts.take(one.sequence, started), one.sequence.room(context) - 1) for one in going
        ]
        blocks = self._steering.cut(work, [*blocks, *(None for _ in begun)], started)
        verdicts = [self._verdict(one, block) for one, block in zip((*going, *begun), blocks, strict=True)]
        num_rows = sum(
            item.chunk + (len(block.token_ids) if block else 0)
            for item, block in zip(work, blocks, strict=True)
        )
        mean = sum(len(item.sequence.tokens) for item in work) / len(work)
        forwarded = ended = started + self._table.step_s(num_rows, len(work), mean)
        outcomes = []
        for one, item, block, verdict in zip((*going, *begun), work, blocks, verdicts, strict=True):
            one.sequence.first_step = one.sequence.first_step or started
            one.sequence.tokens.extend(verdict.committed)
            row = Row(item, Segment(0, 0, (), 0), block)
            outcome = outcome_of(
                row, verdict, started, forwarded, ended, (len(work), num_rows), self._steering.step
            )
            outcomes.append(outcome)
            if (record := outcome.run.record) is not None:
                one.rounds.append(
                    Round(record.drafted, record.accepted, record.committed, record.outcome.value)
                )
        self._clock.now = ended
        self._tell(outcomes, [one.sequence for one in (*going, *begun)])
        if not begun:
            self._drafts.stepped(ended - started)

    def _verdict(self, one: _Going, block: Block | None) -> Verdict:
        draft = block.token_ids if block is not None else []
        return judge(draft, one.target(len(draft) + 1), stop_ids=frozenset(), room=one.left)

    def _tell(self, outcomes: Sequence[Outcome], running: Sequence[Decoding]) -> None:
        going_on = [outcome.sequence for outcome in outcomes if outcome.verdict.finish is None]
        plain = sum(one.spec.plan.mode is Mode.PLAIN for one in going_on)
        decisions = self._steering.decide(
            outcomes, self._drafts, self._recording.max_context, (len(going_on), plain)
        )
        tell_drafters(outcomes, self._drafts, decisions)
        for one in running:
            if one not in going_on:
                one.state = State.ENDED
        waited = {key for key, decision in decisions.items() if decision.wait}
        self._link.answer(self._drafts, self._clock, waited)


def _result(one: _Going) -> Replayed:
    sequence = one.sequence
    return Replayed(
        one.recorded.request_id, tuple(one.rounds), sequence.stats, sequence.timings(), one.recorded.complete
    )


def as_recorded(recorded: Recorded) -> Plan:
    """The plan that the request had."""
    return recorded.plan


def always(drafter: str, k: int, *, k_fixed: bool) -> PlanOf:
    """One drafter for all. ``k_fixed``: just so many tokens a round; else up to so many, by the controller."""
    plan = Plan.speculative(drafter, k, "replay", k_fixed=k_fixed)
    return lambda recorded: replace(plan, prior=None if k_fixed else recorded.plan.prior)

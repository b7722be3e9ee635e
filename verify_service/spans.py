"""The verify tier's spans of one request, made from measured times after the fact.

decode > queue, prefill, round > draft, verify      (`draft` comes from the draft tier, unless the block was looked up here)
"""

from paceline.telemetry import names
from paceline.telemetry.context import TraceContext
from paceline.telemetry.spans import MAX_ROUND_SPANS, AttributeValue, Telemetry, round_context
from paceline.types import Law, ProposalOutcome, RoundRecord
from verify_service.sequence import Admitted, DecodeSpec, Event, Failed, Finished, Run

SLOW = 2.0
"""A round is marked slow that took so many times the mean of the request's rounds before it."""
FEWEST_ROUNDS = 8
"""Before there are so many, none is called slow."""
_FELL_BACK = frozenset(
    {ProposalOutcome.EMPTY, ProposalOutcome.LATE, ProposalOutcome.UNAVAILABLE, ProposalOutcome.CUT}
)


class DecodeSpans:
    """Sees the events of one sequence, in order. Costs one comparison an event when the request is not traced."""

    def __init__(
        self, telemetry: Telemetry, parent: TraceContext | None, spec: DecodeSpec, arrived: float
    ) -> None:
        self._telemetry = telemetry
        self._parent = parent
        self._trace = spec.trace
        self._arrived = arrived
        self._last = arrived
        self._error: str | None = None
        self._finished = False
        self._rounds_s = 0.0
        self._num_slow = 0
        # Greedy decoding has nothing to sample: there every law is the coupled one.
        law = spec.plan.law if spec.plan.law is not None and not spec.sampling.greedy else Law.COUPLED
        self._law = law.value
        self._attributes: dict[str, AttributeValue] = {
            names.REQUEST_ID: spec.request_id,
            names.PLAN_MODE: spec.plan.mode.value,
            names.PLAN_DRAFTER: spec.plan.drafter,
            names.PLAN_K_MAX: spec.plan.k_max,
            names.GEN_AI_USAGE_INPUT_TOKENS: len(spec.prompt_ids),
        }

    def see(self, event: Event) -> None:
        """Record the spans that ``event`` completes."""
        if self._trace is None:
            return
        match event:
            case Admitted():
                pass
            case Run(record=None):
                if self._last == self._arrived:  # else it gave way, and came back
                    self._child(names.SPAN_QUEUE, self._arrived, event.started)
                self._child(names.SPAN_PREFILL, event.started, event.ended)
                self._last = event.ended
            case Run(record=RoundRecord() as record):
                self._round(event, record)
                self._last = event.ended
            case Finished():
                self._finished = True
                stats = event.stats
                self._attributes |= {
                    names.GEN_AI_RESPONSE_FINISH_REASONS: [event.reason.value],
                    names.NUM_ROUNDS: stats.num_rounds,
                    names.NUM_SPEC_STEPS: stats.num_spec_steps,
                    names.NUM_DRAFT_TOKENS: stats.num_draft_tokens,
                    names.NUM_ACCEPTED_DRAFT_TOKENS: stats.num_accepted_draft_tokens,
                    names.NUM_SLOW_ROUNDS: self._num_slow,
                    names.NUM_ROUND_SPANS_ELIDED: max(0, stats.num_rounds - MAX_ROUND_SPANS),
                }
            case Failed(error):
                self._error = str(error)

    def end(self, now: float) -> None:
        """The call is over, whichever way. A caller that has enough (a stop string) cancels: that is no error."""
        if self._trace is None:
            return
        if not self._finished and self._error is None:
            self._attributes[names.CANCELLED] = True
        self._telemetry.record(
            names.SPAN_DECODE,
            self._trace,
            parent=self._parent,
            start=self._arrived,
            end=self._last if self._finished else now,
            attributes=self._attributes,
            error=self._error,
            kind="server",
        )

    def _child(self, name: str, start: float, end: float) -> None:
        assert self._trace is not None
        context = self._telemetry.child(self._trace)
        self._telemetry.record(name, context, parent=self._trace, start=start, end=end)

    def _marks(self, record: RoundRecord) -> list[str]:
        """What stands out about a round."""
        marks = [record.outcome.value] if record.outcome in _FELL_BACK else []
        if record.index >= FEWEST_ROUNDS and record.total_s * record.index > SLOW * self._rounds_s:
            marks.append("slow")
            self._num_slow += 1
        self._rounds_s += record.total_s
        return marks

    def _round(self, run: Run, record: RoundRecord) -> None:
        assert self._trace is not None
        marks = self._marks(record)
        if record.index >= MAX_ROUND_SPANS:
            return
        context = round_context(self._trace, record.index)
        batch: dict[str, AttributeValue] = {
            names.BATCH_SEQUENCES: record.batch_sequences,
            names.BATCH_ROWS: record.batch_rows,
        }
        self._telemetry.record(
            names.SPAN_ROUND,
            context,
            parent=self._trace,
            start=run.started,
            end=run.ended,
            attributes={
                names.ROUND_INDEX: record.index,
                names.ROUND_BASE_LEN: record.base_len,
                names.ROUND_DRAFTED: record.drafted,
                names.ROUND_ACCEPTED: record.accepted,
                names.ROUND_IGNORED: record.ignored,
                names.ROUND_COMMITTED: record.committed,
                names.ROUND_OUTCOME: record.outcome.value,
                names.ROUND_DRAFTER: record.drafter,
                names.ROUND_LAW: self._law,
                names.ROUND_ASKED: record.asked,
                names.ROUND_DEPTH_REASON: record.depth_reason.value,
                names.ROUND_AHEAD_LEVEL: record.ahead_level,
                names.ROUND_AHEAD_HIT: record.ahead_hit,
                names.ROUND_HIDDEN_DRAFT_S: record.hidden_draft_s,
                names.ROUND_MARKS: marks,
                names.ROUND_DRAFT_S: record.draft_s,
                names.ROUND_NETWORK_S: record.network_s,
                names.ROUND_WAIT_S: record.wait_s,
                names.ROUND_VERIFY_S: record.verify_s,
                names.ROUND_BESIDE: record.beside,
                **batch,
            },
        )
        if record.beside:
            self._telemetry.record(
                names.SPAN_DRAFT,
                self._telemetry.child(context),
                parent=context,
                start=run.started,
                end=run.started + record.draft_s,
                attributes={names.ROUND_INDEX: record.index, names.ROUND_DRAFTER: record.drafter},
            )
        self._telemetry.record(
            names.SPAN_VERIFY,
            self._telemetry.child(context),
            parent=context,
            start=run.stepped,
            end=run.ended,
            attributes={
                names.ROUND_FORWARD_S: record.forward_s,
                names.ROUND_ACCEPT_S: record.accept_s,
                **batch,
            },
        )

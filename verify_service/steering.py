"""The controller at work in the engine: gathers the facts of each step, keeps the state, writes the log that replays.

Engine thread only, but for ``now_s``.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol

from paceline.types import AcceptancePrior, DepthReason, Mode, ProposalOutcome
from verify_service import controller
from verify_service.belief import Look
from verify_service.block import Block
from verify_service.controller import decide
from verify_service.costs import CostTable
from verify_service.drafts import Drafts
from verify_service.facts import UNDECIDED, Decision, Ready, Remembered, RowFact, State, StepFacts
from verify_service.native import compiled_controller
from verify_service.prices import Model
from verify_service.scheduler import Work
from verify_service.sequence import Sequence
from verify_service.step import Outcome
from verify_service.trimming import trim

log = logging.getLogger(__name__)

_ASKED = (ProposalOutcome.USED, ProposalOutcome.EMPTY, ProposalOutcome.LATE)


class Policy(Protocol):
    """What decides: ``verify_service.controller``, the same compiled, or what is tried in their place in a replay.

    States are its own; the first one is ``State()``.
    """

    def decide(self, model: Model, state: Any, facts: StepFacts, /) -> tuple[Remembered, dict[int, Decision]]:
        """See ``controller.decide``."""

    def trim(
        self,
        model: Model,
        state: Any,
        ready: SequenceOf[Ready],
        num_sequences: int,
        prompt_rows: int,
        num_plain: int,
        /,
    ) -> dict[int, tuple[int, DepthReason | None]]:
        """See ``controller.trim``."""


class Steering:
    """One controller. ``adaptive`` False: every plan's k_max is taken as it is. ``policy``: else the compiled one, or Python's."""

    def __init__(
        self,
        table: CostTable | None,
        *,
        adaptive: bool = True,
        log_dir: str = "",
        policy: Policy | None = None,
    ) -> None:
        self._model = Model(table)
        self._policy: Policy = policy or compiled_controller() or controller
        self._adaptive = adaptive
        self._state: Remembered = State()
        self._step = 0
        self._ended = 0.0  # of the step before, monotonic
        self._gap_s = -1.0
        self._rows = (0, 0, 0)
        self._looked: set[int] = set()  # sequences whose next round was looked up beside the target
        self._asked: dict[int, tuple[int, int]] = {}
        """By sequence of the step: tokens the draft tier was asked for and waited for, length of its answer (-1: none)."""
        self._trimmed: list[Any] | None = None
        self._log = _open_log(log_dir, self._model.table, time.time_ns()) if log_dir else None

    @property
    def step(self) -> int:
        """Number of the step that comes, or that is under way."""
        return self._step

    def now_s(self, sequences: int, rows: int) -> float:
        """What a step takes now, by all that was seen; from any thread."""
        return Model(self._model.table).times(self._state, sequences, rows)[rows - sequences]

    def cut(
        self, work: SequenceOf[Work], blocks: SequenceOf[Block | None], started: float
    ) -> list[Block | None]:
        """The blocks of a step that is about to run, cut to what pays."""
        rounds = [
            (item.sequence, block) for item, block in zip(work, blocks, strict=True) if block is not None
        ]
        usual = not any(block.read_prompt for _, block in rounds)
        self._gap_s = started - self._ended if rounds and self._ended and usual else -1.0
        self._asked = {sequence.id: _answer(sequence, block) for sequence, block in rounds}
        prompt_rows = sum(item.chunk for item in work if item.is_prefill)
        ready = [
            # Drawn tokens are verified all or none: leaving one out for what it is (its length or confidence tells) would
            # bias what is committed (docs/laws.md).
            Ready(
                sequence.id,
                len(block.token_ids),
                self._fixed(sequence) or bool(block.distributions),
                block.survival,
            )
            for sequence, block in rounds
            if block.token_ids
        ]
        kept: dict[int, tuple[int, DepthReason | None]] = {}
        self._trimmed = None
        if any(not one.fixed for one in ready):
            try:
                num_plain = self._state.num_idle(sequence.id for sequence, _ in rounds)
                kept = self._policy.trim(self._model, self._state, ready, len(rounds), prompt_rows, num_plain)
                self._trimmed = [ready, len(rounds), prompt_rows, num_plain]
            except Exception:
                log.exception("cutting blocks failed; they are verified whole")
        found: list[Block | None] = []
        for item, block in zip(work, blocks, strict=True):
            cut = kept.get(item.sequence.id)
            if block is not None and cut is not None and cut[0] < len(block.token_ids):
                k, reason = cut
                assert reason is not None, "a cut has its reason"
                item.sequence.depth = item.sequence.depth._replace(reason=reason)
                outcome = block.outcome if k else ProposalOutcome.CUT
                block = replace(block, token_ids=block.token_ids[:k], outcome=outcome)  # noqa: PLW2901
            found.append(block)
        num_rows = sum(
            item.chunk + (len(block.token_ids) if block else 0)
            for item, block in zip(work, found, strict=True)
        )
        self._rows = (len(work), num_rows, prompt_rows)
        return found

    def decide(
        self, outcomes: SequenceOf[Outcome], drafts: Drafts, max_context: int, running: tuple[int, int]
    ) -> Mapping[int, Decision]:
        """The depths of the next rounds. ``running``: sequences that go on decoding, and those plain by plan."""
        self._ended = outcomes[0].run.ended
        rows = tuple(self._fact(outcome, drafts, max_context) for outcome in outcomes)
        num_sequences, num_rows, prompt_rows = self._rows
        facts = StepFacts(
            self._step,
            rows,
            num_sequences,
            num_rows,
            prompt_rows,
            sum(len(outcome.sequence.tokens) for outcome in outcomes) / len(outcomes),
            outcomes[0].forward_s,
            outcomes[0].accept_s,
            self._gap_s,
            max((outcome.residence_s for outcome in outcomes), default=0.0),
            *running,
        )
        self._step += 1
        state: Remembered
        try:
            state, decisions = self._policy.decide(self._model, self._state, facts)
        except Exception:
            # A fault of ours may cost time only: what was learnt is dropped, the next rounds are plain or as fixed.
            log.exception("deciding depths failed")
            self.close()
            state, decisions = State(), {row.id: _without_thought(row) for row in rows if not row.finished}
        if self._log is not None:
            self._put({"trim": self._trimmed, "facts": facts, "decisions": list(decisions.items())})
        self._state = state
        for outcome in outcomes:
            decision = decisions.get(outcome.sequence.id)
            if decision is not None:
                outcome.sequence.depth = decision
        return decisions

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended outside a step: cancelled, or failed."""
        self._looked.discard(sequence.id)
        state = self._state.without(sequence.id)
        if state is not self._state:
            self._state = state
            self._put({"forget": sequence.id})

    def close(self) -> None:
        """End the log. Never raises."""
        stream, self._log = self._log, None
        if stream is not None:
            try:
                stream.close()
            except OSError as error:
                _complain(stream, error)

    def _put(self, entry: object) -> None:
        """A line more. A log that cannot be written ends there: requests go on."""
        if self._log is None:
            return
        try:
            _write(self._log, entry)
        except Exception as error:  # a full disk, a value that is no JSON: nobody else's matter
            _complain(self._log, error)
            with contextlib.suppress(OSError):
                self._log.close()  # what it still holds cannot be written either
            self._log = None

    def _fixed(self, sequence: Sequence) -> bool:
        return sequence.spec.plan.k_fixed or not self._adaptive

    def _fact(self, outcome: Outcome, drafts: Drafts, max_context: int) -> RowFact:
        sequence, record, verdict = outcome.sequence, outcome.run.record, outcome.verdict
        plan = sequence.spec.plan
        finished = verdict.finish is not None
        if plan.mode is Mode.PLAIN:
            return RowFact(sequence.id, "", 0, 0, False, 0, -1, 0, 0, None, None, finished)
        asked, proposed = self._asked.get(sequence.id, (0, -1))
        room = max(sequence.room(max_context) - 1, 0)
        looked = sequence.id in self._looked
        found = None
        if not finished and not sequence.depth.rest:
            found = drafts.beside.look(sequence, min(plan.k_max, room))
        if found is not None:
            self._looked.add(sequence.id)
        else:
            self._looked.discard(sequence.id)
        return RowFact(
            id=sequence.id,
            drafter=plan.drafter,
            k_max=plan.k_max,
            room=room,
            fixed=self._fixed(sequence),
            asked=asked,
            proposed=proposed,
            drafted=record.drafted if record is not None else 0,
            agreed=verdict.accepted + verdict.ignored,
            look=drafts.looked(sequence),
            # What requests did with look-ups says nothing of the drafter that is asked where these find nothing.
            prior=None if drafts.beside.asks(plan.drafter) else plan.prior,
            finished=finished,
            found=found,
            alone=plan.drafter in drafts.beside.alone,
            looked=looked,
            unread=drafts.unread(sequence),
        )


def _answer(sequence: Sequence, block: Block) -> tuple[int, int]:
    """(tokens the draft tier was asked for and waited for, length of its answer; -1: none came)."""
    outcome = block.instead if block.beside else block.outcome
    if outcome not in _ASKED or not sequence.depth.wait:
        return 0, -1
    if block.beside:
        return sequence.depth.k, 0 if outcome is ProposalOutcome.EMPTY else -1
    return sequence.depth.k, -1 if outcome is ProposalOutcome.LATE else len(block.token_ids)


def _without_thought(row: RowFact) -> Decision:
    k = min(row.k_max, row.room) if row.fixed else 0
    return UNDECIDED._replace(k=k, wait=k > 0)


# --- the log --------------------------------------------------------------------------------------------------------


def _open_log(directory: str, table: CostTable, stamp: int) -> IO[str] | None:
    path = Path(directory) / f"depths-{stamp}-{os.getpid()}.jsonl"
    head = {
        "curves": table.curves,
        "context": table.context,
        "row_key_s": table.row_key_s,
        "sequence_key_s": table.sequence_key_s,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w", encoding="utf-8")
        _write(stream, head)
    except OSError as error:
        log.error("no log of depths", extra={"path": str(path), "why": str(error)})
        return None
    return stream


def _complain(stream: IO[str], error: Exception) -> None:
    log.error(
        "the log of depths has ended: it cannot be written", extra={"path": stream.name, "why": str(error)}
    )


def _write(stream: IO[str], entry: object) -> None:
    # Floats are written so that they are read back to the last bit.
    stream.write(json.dumps(entry, default=_plainly) + "\n")


def _plainly(value: object) -> object:
    if isinstance(value, DepthReason):
        return value.value
    if isinstance(value, AcceptancePrior):
        return [value.mean, value.strength, value.by_position]
    raise TypeError(type(value))


def replay(path: Path) -> tuple[int, list[str]]:
    """Decide all of a log again: how many decisions there are, and where one comes out otherwise than it was taken.

    In Python: what a server decided by compiled code is compared with that.
    """
    with path.open(encoding="utf-8") as lines:
        head = json.loads(next(lines))
        curves = tuple((count, tuple(map(tuple, curve))) for count, curve in head["curves"])
        model = Model(CostTable(curves, head["context"], head["row_key_s"], head["sequence_key_s"]))
        state, count, wrong = State(), 0, []
        for line in lines:
            entry = json.loads(line)
            if "forget" in entry:
                state = state.without(entry["forget"])
                continue
            facts = _facts(entry["facts"])
            if entry["trim"] is not None:
                ready, *rest = entry["trim"]
                blocks = [Ready(*one) for one in ready]
                kept = trim(model, state, blocks, *rest)
                drafted = {row.id: row.drafted for row in facts.rows}
                count += len(kept)
                wrong += [
                    f"step {facts.step}: {key} kept {drafted[key]}, again {k}"
                    for key, (k, _) in kept.items()
                    if key in drafted and drafted[key] != k
                ]
            state, decisions = decide(model, state, facts)
            again = json.loads(json.dumps(list(decisions.items()), default=_plainly))
            count += len(again)
            if again != entry["decisions"]:
                wrong.append(f"step {facts.step}: {entry['decisions']}, again {again}")
    return count, wrong


def _facts(listed: list[Any]) -> StepFacts:
    step, rows, *rest = listed
    return StepFacts(step, tuple(_row(row) for row in rows), *rest)


def _row(listed: list[Any]) -> RowFact:
    row = RowFact(*listed)
    return row._replace(
        look=Look(*row.look) if row.look is not None else None,
        found=tuple(row.found) if row.found is not None else None,
        prior=AcceptancePrior(row.prior[0], row.prior[1], tuple(row.prior[2])) if row.prior else None,  # type: ignore[index]
    )

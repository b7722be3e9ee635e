"""One engine step, as a list: blocks, packed forward, the target's own tokens, verdicts, commits, news to the drafter.

Plain rows, verify rows and prompt chunks share the forward. Nothing is saved and restored: a step that fails leaves
the KV lengths where they were, and can be run again.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from paceline.engine import Runner, Segment
from paceline.sampling import TokenRow, decide, draft_tokens, follow
from paceline.types import Law, RoundRecord
from verify_service.block import Block
from verify_service.drafts import Drafts
from verify_service.facts import Decision
from verify_service.scheduler import Work
from verify_service.sequence import Run, Sequence, State
from verify_service.verdict import Verdict, commit, judge, settle

_LAW_OF: Callable[[Work], Law] = attrgetter("sequence.law")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did to one sequence."""

    sequence: Sequence
    run: Run
    verdict: Verdict
    forward_s: float
    accept_s: float
    residence_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part: what it runs, and the draft among it."""

    work: Work
    segment: Segment
    block: Block | None


def take_blocks(work: SequenceOf[Work], drafts: Drafts, max_context: int) -> list[Block | None]:
    """The freshest valid block of each round, cut to what may still be committed; None for prompt chunks."""
    now = time.monotonic()
    return [
        None if item.is_prefill else cut(drafts.take(item.sequence, now), item.sequence.room(max_context) - 1)
        for item in work
    ]


def run_step(
    runner: Runner,
    work: SequenceOf[Work],
    blocks: SequenceOf[Block | None],
    max_context: int,
    step: int = 0,
) -> list[Outcome]:
    """Forward, accept, commit. Raises whatever the forward or the sampler raise, before anything is committed."""
    started = time.monotonic()
    rows = [_row(item, block, runner) for item, block in zip(work, blocks, strict=True)]
    logits = runner.forward([row.segment for row in rows])
    forwarded = time.monotonic()
    laws = list(map(_LAW_OF, work))
    if laws.count(Law.COUPLED) == len(laws):
        verdicts = _coupled_verdicts(rows, logits, max_context)
    else:
        verdicts = _verdicts_by_law(rows, logits, max_context)
    for row, verdict in verdicts:
        commit(row.work.sequence, verdict, runner.kv)

    ended = time.monotonic()
    for row in rows:
        if not row.work.sequence.first_step:
            row.work.sequence.first_step = started
    batch = (len(rows), sum(len(row.segment.token_ids) for row in rows))
    return [outcome_of(row, verdict, started, forwarded, ended, batch, step) for row, verdict in verdicts]


def _coupled_verdicts(
    rows: SequenceOf[Row], logits: torch.Tensor, max_context: int
) -> list[tuple[Row, Verdict]]:
    """The target's own tokens for all rows, and what they make of the drafts; ``logits`` [T, V]."""
    drawn = [row for row in rows if row.segment.num_logits]
    drafts = [row.block.token_ids if row.block else [] for row in drawn]
    targets = follow(logits, [token_row for row in drawn for token_row in _token_rows(row)], drafts)
    verdicts: list[tuple[Row, Verdict]] = []
    for row, draft, target in zip(drawn, drafts, targets, strict=True):
        sequence = row.work.sequence
        room = sequence.room(max_context)
        verdicts.append((row, judge(draft, target, stop_ids=sequence.spec.stop_ids, room=room)))
    return verdicts


def _verdicts_by_law(
    rows: SequenceOf[Row], logits: torch.Tensor, max_context: int
) -> list[tuple[Row, Verdict]]:
    """Each sequence under its own law; a step that holds a sampled one."""
    verdicts: list[tuple[Row, Verdict]] = []
    at = 0
    for row in rows:
        sequence, count = row.work.sequence, row.segment.num_logits
        part = logits[at : at + count]
        at += count
        if not count:
            continue
        if not sequence.law.sampled:
            verdicts += _coupled_verdicts([row], part, max_context)
            continue
        block = row.block
        draft = draft_tokens(block.token_ids, block.distributions) if block else []
        accepted, token = decide(sequence.law, part, _token_rows(row), draft)
        tokens = [*(kept.token_id for kept in draft[:accepted]), token]
        room = sequence.room(max_context)
        verdicts.append((row, settle(tokens, accepted, stop_ids=sequence.spec.stop_ids, room=room)))
    return verdicts


def cut(block: Block, most: int) -> Block:
    """The block with at most so many tokens. ``k`` is asked for so that nothing has to be cut; this holds for any drafter."""
    if len(block.token_ids) <= most:
        return block
    return replace(block, token_ids=block.token_ids[:most], distributions=block.distributions[:most])


def _row(work: Work, block: Block | None, runner: Runner) -> Row:
    sequence = work.sequence
    assert sequence.slot is not None
    start = runner.kv.length(sequence.slot)
    tokens = sequence.tokens[start : start + work.chunk]
    if block is None:
        is_last = start + work.chunk == len(sequence.tokens)
        return Row(work, Segment(sequence.slot, start, tokens, 1 if is_last else 0), None)
    return Row(work, Segment(sequence.slot, start, tokens + block.token_ids, 1 + len(block.token_ids)), block)


def _token_rows(row: Row) -> list[TokenRow]:
    """One per row of logits: its absolute position, and what stands before it if penalties ask."""
    sequence, spec = row.work.sequence, row.work.sequence.spec
    length, prompt = len(sequence.tokens), spec.prompt_ids
    draft = row.block.token_ids if row.block else []
    if not spec.sampling.needs_history:
        return [TokenRow(spec.sampling, length + j, prompt, ()) for j in range(row.segment.num_logits)]
    output = sequence.tokens[len(prompt) :]
    return [
        TokenRow(spec.sampling, length + j, prompt, output + draft[:j]) for j in range(row.segment.num_logits)
    ]


def outcome_of(
    row: Row,
    verdict: Verdict,
    started: float,
    forwarded: float,
    ended: float,
    batch: tuple[int, int],
    step: int,
) -> Outcome:
    """What the step did to the row's sequence, whose counts and times move on. Its tokens are committed already."""
    sequence, block = row.work.sequence, row.block
    position = len(sequence.tokens) - len(verdict.committed)
    previous = sequence.mark
    sequence.mark = ended
    if block is None:
        sequence.state = State.RUNNING
        if sequence.first_token:  # back after giving way: the time away was waiting
            sequence.wait_s += ended - previous
        else:
            sequence.first_token, previous = ended, sequence.first_step
        run = Run(position, verdict.committed, None, previous, started, ended)
        return Outcome(sequence, run, verdict, forwarded - started, ended - forwarded)
    link_s = block.answered_at - block.asked_at
    draft_s = min(block.residence_s, link_s)
    depth = sequence.depth
    record = RoundRecord(
        index=sequence.stats.num_rounds,
        base_len=position,
        drafted=len(block.token_ids),
        accepted=verdict.accepted,
        ignored=verdict.ignored,
        committed=len(verdict.committed),
        outcome=block.outcome,
        drafter=block.drafter,
        batch_sequences=batch[0],
        batch_rows=batch[1],
        draft_s=draft_s,
        network_s=link_s - draft_s,
        wait_s=started - previous - link_s,
        verify_s=ended - started,
        forward_s=forwarded - started,
        accept_s=ended - forwarded,
        asked=block.found if block.beside else depth.k if depth.wait else 0,
        depth_reason=depth.reason,
        expected_tokens=depth.expected_tokens,
        next_worth_s=depth.next_worth_s,
        next_cost_s=depth.next_cost_s,
        step=step,
        hidden_draft_s=max(0.0, block.work_s - draft_s),
        ahead_level=block.ahead_level,
        ahead_hit=block.ahead_hit,
        beside=block.beside,
    )
    sequence.add_round(record)
    run = Run(position, verdict.committed, record, previous, started, ended)
    return Outcome(sequence, run, verdict, forwarded - started, ended - forwarded, block.residence_s)


def tell_drafters(outcomes: SequenceOf[Outcome], drafts: Drafts, decisions: Mapping[int, Decision]) -> None:
    """The news of the step, before any client hears of it: the drafter's time is on the critical path."""
    for outcome in outcomes:
        if outcome.verdict.finish is None:
            sequence, record = outcome.sequence, outcome.run.record
            if record is not None:
                drafts.verified(sequence, record.drafted, record.accepted)
            decision = decisions[sequence.id]
            drafts.advance(sequence, len(outcome.verdict.committed), decision.k, wait=decision.wait)
        else:
            drafts.close(outcome.sequence)
    drafts.flush()

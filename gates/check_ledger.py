"""The three gates from what a ledger has seen, without a request of their own: speculative requests against the holdout's.

The two were parted by lot within each task, so tasks are compared one by one. Bounds are those that hold however often one looks
(``router.evidence``, ``router.quantiles``): wider than a check's, and P99 needs some thousands of requests.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from gates.bootstrap import Estimate
from gates.check import (
    FEWEST,
    GOLDEN_ACCEPTANCE,
    TAIL_WORDS,
    Check,
    Facts,
    TaskCheck,
    above,
    all_of,
    less,
    memory_gate,
    worth_it,
)
from gates.evidence import blocks_of_row
from gates.pairs import Verdict
from gates.tail_gate import TAIL_LIMIT, TailGate
from router.evidence import Interval, acceptance, break_even, seconds_per_token, speed_ratio
from router.holdout import comparisons_from
from router.ledger.group import Arm, Group
from router.ledger.sums import AT, Row, total
from router.quantiles import edge
from router.tail import compare_tails

LENGTH_UNIT_S = 1e-3
"""A token of a length, where lengths are counted in the bins of times."""


def judge_ledger(rows: Iterable[tuple[Group, Row]], holdout: str, facts: Facts) -> Check:
    """Hold the gates against the ledger's ``rows`` and its holdout's document."""
    known = [(group, row) for group, row in rows if group.arm in {Arm.AUTO.value, Arm.HOLDOUT.value}]
    names = sorted({group.task for group, _ in known})
    counts = {
        (task, arm, metric): dict(map(tuple, bins)) for task, arm, metric, bins in json.loads(holdout or "[]")
    }
    heavy = {name: words for name in names if (words := _heavier(name, counts))}
    tails = {
        one.task: Estimate(one.ratio.low, one.ratio.estimate, one.ratio.high, min(one.requests))
        for one in comparisons_from(holdout or "[]")
        if one.metric == "total" and one.p == 0.99
    }
    tasks = tuple(_task(name, known, tails.get(name), heavy=name in heavy) for name in names)
    judged = [task for task in tasks if task.requests >= FEWEST]
    speculative = total(row for group, row in known if group.drafter)
    requests = sum(int(row[AT["requests"]]) for _, row in known)
    outputs = int(total(row for _, row in known)[AT["output_tokens"]])
    return Check(
        facts=facts,
        requests=requests,
        same=0,
        compared=0,
        memory=memory_gate(facts, _longest(holdout), None, 0.0),
        acceptance=all_of(task.acceptance for task in judged),
        tail=_tail([task.tail for task in judged], broken=any(task.task in heavy for task in judged)),
        speed=None,
        tasks=tasks,
        short=0.0,
        blocks=blocks_of_row(speculative),
        notes=(
            "from the ledger: outputs were not compared, it holds none",
            f"{outputs / max(requests, 1):.0f} output tokens a request on average",
            *(f"tail of {name}: {words}" for name, words in heavy.items()),
        ),
    )


def _task(name: str, known: Sequence[tuple[Group, Row]], tail: Estimate | None, *, heavy: bool) -> TaskCheck:
    mine = [(group, row) for group, row in known if group.task == name]
    batches = {group.batch for group, row in mine if group.drafter}
    most = max(batches, key=lambda batch: _tokens(mine, batch), default="1")
    speculative = total(row for group, row in mine if group.drafter)
    same_size = total(row for group, row in mine if group.drafter and group.batch == most)
    plain = seconds_per_token(total(row for group, row in mine if not group.drafter and group.batch == most))
    share, requests = acceptance(speculative), int(speculative[AT["requests"]])
    measured = break_even(same_size, plain.mean) if plain.count else None
    needed = GOLDEN_ACCEPTANCE if measured is None else measured
    speed = _estimate(speed_ratio(plain, seconds_per_token(same_size)))
    verdict = above(_estimate(share), needed) if requests >= FEWEST else Verdict.OPEN
    do, words = worth_it(requests, verdict, speed, tail)
    if heavy and do is not Verdict.NO:
        do, words = Verdict.NO, TAIL_WORDS
    return TaskCheck(
        task=name,
        requests=requests,
        share=_estimate(share),
        needed=needed,
        measured=measured is not None,
        margin=less(_estimate(share), needed),
        acceptance=verdict,
        speed=speed,
        tail=tail,
        drafted_a_round=int(speculative[AT["drafted"]]) / max(1, int(speculative[AT["spec_rounds"]])),
        short=0.0,
        verdict=do,
        words=words,
    )


def _tokens(known: Sequence[tuple[Group, Row]], batch: str) -> int:
    return sum(int(row[AT["timed_tokens"]]) for group, row in known if group.drafter and group.batch == batch)


def _estimate(interval: Interval) -> Estimate | None:
    if not interval.count or not math.isfinite(interval.high):
        return None
    return Estimate(interval.low, interval.mean, interval.high, interval.count)


def _heavier(task: str, counts: Mapping[tuple[str, str, str], Mapping[int, int]]) -> str:
    """That a task's tail is surely heavier, in words; empty: it is not. Sees with hundreds of requests what bounds of P99 do not."""
    for metric, named in (("gap", "time a token"), ("total", "whole request")):
        mine, plain = (counts.get((task, arm.value, metric), {}) for arm in (Arm.AUTO, Arm.HOLDOUT))
        test = compare_tails(mine, plain)
        if test is not None and test.heavier:
            return f"{named}: {test.words}"
    return ""


def _tail(tails: Sequence[Estimate | None], *, broken: bool) -> TailGate:
    """The worst task's; every one must be shown to hold."""
    known = [tail for tail in tails if tail is not None]
    if not known:
        return TailGate(Verdict.NO if broken else Verdict.OPEN, None, 0.0, 0.0)
    worst = max(known, key=lambda tail: tail.high)
    verdicts = [
        Verdict.OPEN
        if tail is None
        else Verdict.NO
        if tail.low > TAIL_LIMIT
        else Verdict.YES
        if tail.high <= TAIL_LIMIT
        else Verdict.OPEN
        for tail in tails
    ]
    return TailGate(Verdict.NO if broken else all_of(verdicts), worst, 0.0, 0.0)


def _longest(holdout: str) -> list[int]:
    """Lengths of requests in tokens, one entry each, as far as they were counted."""
    lengths: list[int] = []
    for _, _, metric, counts in json.loads(holdout or "[]"):
        if metric == "length":
            for number, requests in counts:
                lengths += [math.ceil(edge(number + 1) / LENGTH_UNIT_S)] * requests
    return lengths

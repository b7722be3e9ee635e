"""Which known troubles a pair shows, each with its evidence and its remedy.

Every test has a stated chance of a false alarm (1 in 50 for the bounds of ``router.evidence``, 1 in 200 for tails and repeats, 1 in 1,000 for two kinds of rounds), and asks
for a difference that matters besides. A trouble is named once, where it comes from: a slow whole has no tail of its own, and
what a drafter lost over time was not lost offline.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gates.bimodal import Blocks, Shape, shape_of
from gates.check import SHORT_OUTPUT
from gates.evidence import PLAIN, SPECULATIVE, Evidence, Seen, blocks_of, sums
from gates.pairs import PairOfRuns, pairs_of, times
from gates.repeats import fisher, repeated_at
from gates.tail_gate import TAIL_LIMIT, tail_gate
from router.evidence import (
    MIN_REQUESTS,
    UNKNOWN,
    Interval,
    acceptance,
    break_even,
    seconds_per_token,
    speed_ratio,
)
from router.ledger.sums import AT
from router.tail import TailTest, compare_tails

OFFLINE_GAP, DRIFT_GAP = 0.15, 0.10
_LEAST_REQUESTS = 40
_SHOWN = 5
_FALSE_ALARM = 0.005
_BATCH_MIDDLE = {"1": 1, "2-4": 3, "5-10": 7, "11-31": 20, "32+": 40}


class Trouble(Enum):
    """The known ones."""

    SLOW = "the whole is slow"
    TAIL = "the mean is fast, the tail is slow"
    FIRST = "the first token comes late"
    SLOWEST = "the slowest requests are slower than plain ones"
    QUALITY = "the output can differ from plain decoding"
    REPEATS = "phrases are repeated"
    COST = "throughput is up, cost is not down"
    OFFLINE = "acceptance offline is above acceptance online"
    SHORT = "outputs are too short"
    DRIFT = "the drafter has drifted"


REMEDIES = {
    Trouble.SLOW: "leave this task to plain decoding (`paceline policy plain --task ...`), lower k, or take a better or cheaper drafter; "
    "`paceline plan` says what it would need",
    Trouble.TAIL: "let the verify tier choose the depth (verify.depth = adaptive, no k in the request), which stops for requests that "
    "accept nothing; split the kinds of requests by router.task_rules and speculate for the good one only",
    Trouble.FIRST: "a drafter reads the prompt beside the target: take one that only looks up (`--drafter suffix`), or give the drafter a device of its own; "
    "prompts of the requests named here are where to look",
    Trouble.SLOWEST: "look at the requests named here: leave their kind to plain decoding (router.task_rules, `paceline policy plain --task ...`); let the "
    "verify tier choose the depth (no k in the request)",
    Trouble.QUALITY: "take law = coupled, whose tokens are those of plain decoding, and a runner that `paceline info` calls deterministic",
    Trouble.REPEATS: "switch speculation off now (`paceline policy plain`) and report it: rejected tokens were not rolled back",
    Trouble.COST: "the drafter takes memory that sequences had: a smaller drafter, less KV for it, or look-up (suffix, ngram), which has none",
    Trouble.OFFLINE: "measure offline on this traffic (the same chat template, temperature, lengths and precision), not on a benchmark",
    Trouble.SHORT: "raise router.min_expected_tokens, or leave this task to plain decoding: most of its time is the prompt",
    Trouble.DRIFT: "the traffic or the target has changed since the drafter was trained: train it again on recent answers (training/)",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One trouble of one type of task; ``task`` empty: of all."""

    trouble: Trouble
    task: str
    evidence: str

    @property
    def remedy(self) -> str:
        """What to do."""
        return REMEDIES[self.trouble]


@dataclass(frozen=True, slots=True)
class Picture:
    """Accepted lengths of one type of task, and what kind of rounds they come from."""

    task: str
    blocks: Blocks
    requests: int
    """That drafted."""
    shape: Shape | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, and what was looked at."""

    findings: tuple[Finding, ...]
    pictures: tuple[Picture, ...]
    requests: int
    speculative: int
    not_judged: tuple[str, ...]
    """What too few requests were there for, in words."""
    judged: bool
    """Whether there were enough for anything."""


@dataclass(frozen=True, slots=True)
class _Task:
    """What is seen of one type of task."""

    name: str
    speculative: Sequence[Seen]
    plain: Sequence[Seen]
    shape: Shape | None
    accepted: Interval
    speed: Interval
    compared: tuple[int, int]
    """Requests that the speed is from, speculative and plain ones."""
    needed: float | None
    tail: TailTest | None
    tail_metric: str

    @property
    def slow(self) -> bool:
        """Surely slower than plain, or surely under break-even."""
        # Break-even is measured, too: below some dozens of requests it says little.
        under = self.needed is not None and self.accepted.high < self.needed and self.speed.mean < 1.0
        return self.speed.high < 1.0 or (under and self.accepted.count >= _LEAST_REQUESTS)

    @property
    def drifted(self) -> tuple[Interval, Interval] | None:
        """Acceptance in the first and in the last part of the time, where it fell for one and the same drafter."""
        by_version: dict[tuple[str, str], list[Seen]] = {}
        for one in self.speculative:
            by_version.setdefault((one.group.drafter, one.group.version), []).append(one)
        for seen in by_version.values():
            ends = _ends(sorted(seen, key=lambda one: one.at))
            if ends is None:
                continue
            first, last = (acceptance(sums(part)) for part in ends)
            if first.mean - last.mean >= DRIFT_GAP and last.high < first.low:
                return first, last
        return None


def diagnose(evidence: Evidence) -> Diagnosis:
    """All that the evidence shows."""
    tasks = [_task(evidence, name) for name in evidence.tasks()]
    findings = [finding for task in tasks for finding in _findings(evidence, task)]
    findings += _paired_tail(evidence, known={finding.trouble for finding in findings})
    whole_requests = sum(int(one.row[AT["requests"]]) for one in evidence.seen)
    return Diagnosis(
        findings=tuple(findings),
        pictures=tuple(
            Picture(task.name, blocks_of(task.speculative), _drafted(task), task.shape)
            for task in tasks
            if task.speculative
        ),
        requests=whole_requests,
        speculative=sum(int(sums(task.speculative)[AT["requests"]]) for task in tasks),
        not_judged=tuple(words for task in tasks if task.speculative and (words := _not_judged(task))),
        judged=any(task.speed.count or task.accepted.count for task in tasks),
    )


def _drafted(task: _Task) -> int:
    return int(sums(task.speculative)[AT["spec_requests"]])


def _not_judged(task: _Task) -> str:
    """Of which there were fewer requests than bounds take."""
    words = []
    if not task.speed.count:
        mine, theirs = task.compared
        words.append(
            f"speed, from {mine} speculative and {theirs} plain requests where {MIN_REQUESTS} of each are needed"
        )
    if not task.accepted.count:
        drafted = _drafted(task)
        requests = "request" if drafted == 1 else "requests"
        words.append(f"acceptance, from {drafted} {requests} that drafted where {MIN_REQUESTS} are needed")
    return f"{task.name}: {'; '.join(words)}" if words else ""


def _task(evidence: Evidence, name: str) -> _Task:
    seen = [one for one in evidence.seen if one.group.task == name]
    speculative = [one for one in seen if one.way == SPECULATIVE]
    plain = [one for one in seen if one.way == PLAIN and one.group.arm != "ineligible"]
    mine, theirs = _same_batch(speculative, plain)
    cost = seconds_per_token(sums(theirs))
    row = sums(mine)
    tests = {
        metric: test for metric in ("gap", "total") if (test := _tails(evidence, name, metric)) is not None
    }
    metric = min(tests, key=lambda one: tests[one].chance, default="")
    return _Task(
        name=name,
        speculative=speculative,
        plain=plain,
        shape=shape_of(blocks_of(speculative)),
        accepted=acceptance(sums(speculative)),
        speed=speed_ratio(cost, seconds_per_token(row)) if cost.count else UNKNOWN,
        compared=(int(row[AT["timed_requests"]]), int(sums(theirs)[AT["timed_requests"]])),
        needed=break_even(row, cost.mean) if cost.count else None,
        tail=tests.get(metric),
        tail_metric={"gap": "time a token", "total": "time of the request"}.get(metric, ""),
    )


def _tails(evidence: Evidence, task: str, metric: str) -> TailTest | None:
    both = [evidence.times.get((task, way, metric), {}) for way in (SPECULATIVE, PLAIN)]
    return compare_tails(both[0], both[1])


def _same_batch(speculative: Sequence[Seen], plain: Sequence[Seen]) -> tuple[Sequence[Seen], Sequence[Seen]]:
    """Of steps of the same size, where both were seen in it: what a token costs depends on how many share a step."""
    together = {one.group.batch for one in speculative} & {one.group.batch for one in plain}
    if not together:
        return speculative, plain
    most = max(
        together,
        key=lambda batch: min(_tokens(part, batch) for part in (speculative, plain)),
    )
    return (
        [one for one in speculative if one.group.batch == most],
        [one for one in plain if one.group.batch == most],
    )


def _tokens(seen: Iterable[Seen], batch: str) -> int:
    return sum(int(one.row[AT["timed_tokens"]]) for one in seen if one.group.batch == batch)


# --- the troubles ---------------------------------------------------------------------------------------------------


def _findings(evidence: Evidence, task: _Task) -> Iterator[Finding]:
    def found(trouble: Trouble, words: str) -> Finding:
        return Finding(trouble, task.name, words)

    if task.slow:
        yield found(Trouble.SLOW, _slow_words(task))
    elif words := _tail_words(task):
        yield found(Trouble.TAIL, words)
    for trouble, test in (
        (Trouble.QUALITY, _quality),
        (Trouble.REPEATS, _repeats),
        (Trouble.COST, _cost),
        (Trouble.SHORT, _short),
        (Trouble.DRIFT, _drift),
    ):
        if words := test(task):
            yield found(trouble, words)
    if words := _offline(evidence, task):
        yield found(Trouble.OFFLINE, words)


def _paired_tail(evidence: Evidence, known: Set[Trouble]) -> Iterator[Finding]:
    """The tail of requests recorded both ways, as ``paceline check`` judges it, with the requests that it is made of.

    Of all tasks at once, as the check looks at it: a tail that failed there is named here.
    """
    pairs = pairs_of(evidence.seen)
    gate = tail_gate(pairs)
    for name in gate.failing:
        trouble = Trouble.FIRST if name == "first token" else Trouble.SLOWEST
        if trouble is Trouble.SLOWEST and known & {Trouble.SLOW, Trouble.TAIL}:
            continue  # named already, where it comes from
        ratio = gate.lines[name]
        yield Finding(
            trouble,
            "",
            f"P99 of the {name} is {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) times plain over {len(pairs)} requests, "
            f"the mark is {TAIL_LIMIT:.2f}; {_made_of(pairs, name)}",
        )


def _made_of(pairs: Sequence[PairOfRuns], name: str) -> str:
    """The slowest speculative requests beyond the mark, plain time and speculative one; or where none is, the slowest."""
    plain, after = (times([getattr(pair, way) for pair in pairs], name) for way in ("plain", "speculative"))
    mark = TAIL_LIMIT * float(np.quantile(plain, 0.99, method="higher"))
    order = sorted(range(len(pairs)), key=lambda index: -float(after[index]))
    beyond = [index for index in order if after[index] > mark]
    shown = [
        f"{pairs[index].speculative.key} ({pairs[index].speculative.group.task}, {1e3 * plain[index]:.1f} -> {1e3 * after[index]:.1f} ms)"
        for index in (beyond or order)[:_SHOWN]
    ]
    more = f" and {len(beyond) - _SHOWN} more" if len(beyond) > _SHOWN else ""
    return f"beyond it {len(beyond)} of {len(pairs)}, by id or line: {', '.join(shown)}{more}"


def _slow_words(task: _Task) -> str:
    words = []
    if task.speed.count:
        words.append(f"{task.speed.mean:.2f} of plain speed ({task.speed.low:.2f} to {task.speed.high:.2f})")
    needed = "" if task.needed is None else f" where {task.needed:.2f} would break even"
    if task.accepted.count:
        words.append(
            f"accepted share {task.accepted.mean:.2f} ({task.accepted.low:.2f} to {task.accepted.high:.2f}){needed}"
        )
    return "; ".join(words)


def _tail_words(task: _Task) -> str:
    fast = not task.speed.count or task.speed.mean > 1.0
    two_kinds = task.shape is not None and task.shape.bimodal and _drafted(task) >= MIN_REQUESTS
    heavier = task.tail is not None and task.tail.heavier
    if not fast or not (heavier or (task.tail is None and two_kinds)):
        return ""
    words = []
    if task.speed.count:
        words.append(f"{task.speed.mean:.2f} of plain speed on the mean")
    if heavier and task.tail is not None:
        words.append(f"{task.tail_metric}: {task.tail.words}")
    if task.shape is not None:
        words.append(f"{task.shape.all_rejected:.0%} of the blocks wholly rejected; {task.shape.words}")
    return "; ".join(words)


def _quality(task: _Task) -> str:
    lawful = {one.group.law for one in task.speculative} - {"", "coupled"}
    words = []
    if lawful:
        count = sum(int(one.row[AT["requests"]]) for one in task.speculative if one.group.law in lawful)
        words.append(
            f"{count} requests under the law {' and '.join(sorted(lawful))}: the distribution of plain decoding, not its tokens"
        )
    loose = sum(one.numerics == "best-effort" for one in task.speculative)
    if loose:
        words.append(
            f"{loose} requests with numerics best-effort: a row's values depend on what shares its batch"
        )
    different, compared = _different(task)
    if different:
        words.append(f"{different} of {compared} outputs differ from plain decoding of the same request")
    return "; ".join(words)


def _different(task: _Task) -> tuple[int, int]:
    plain = {one.key: one.token_ids for one in task.plain if one.key}
    pairs = [(one.token_ids, plain[one.key]) for one in task.speculative if one.key in plain]
    # A broken rollback has a name of its own.
    return sum(a != b and (repeated_at(a) is None or repeated_at(b) is not None) for a, b in pairs), len(
        pairs
    )


def _repeats(task: _Task) -> str:
    counts = []
    for seen in (task.speculative, task.plain):
        told = [one.token_ids for one in seen if one.token_ids]
        counts.append((sum(repeated_at(ids) is not None for ids in told), len(told)))
    (mine, of_mine), (theirs, of_theirs) = counts
    if not mine or not of_theirs:
        return ""
    chance = fisher(mine, of_mine, theirs, of_theirs)
    if chance > _FALSE_ALARM:
        return ""
    return f"{mine} of {of_mine} speculative outputs repeat a phrase on the spot, {theirs} of {of_theirs} plain ones do (chance {chance:.1g})"


def _cost(task: _Task) -> str:
    """Requests are faster, the device is not: fewer sequences share a step than before."""
    mine, theirs = (_device_s_per_token(seen) for seen in (task.speculative, task.plain))
    faster = speed_ratio(seconds_per_token(sums(task.plain)), seconds_per_token(sums(task.speculative)))
    if mine is None or theirs is None or not faster.count or faster.low <= 1.0:
        return ""
    shared, before = _sequences(task.speculative), _sequences(task.plain)
    if mine < 0.97 * theirs or shared > 0.8 * before:
        return ""
    return (
        f"a request is {faster.mean:.2f} times as fast, but a step holds about {shared:.0f} sequences instead of {before:.0f}: "
        f"{1e3 * mine:.2f} ms of the device for a token against {1e3 * theirs:.2f} plain"
    )


def _device_s_per_token(seen: Sequence[Seen]) -> float | None:
    """Time of the target's device for a token: a step's time belongs to all that share it."""
    spent = tokens = 0.0
    for one in seen:
        spent += int(one.row[AT["verify_ns"]]) * 1e-9 / _BATCH_MIDDLE[one.group.batch]
        tokens += int(one.row[AT["emitted"]])
    return spent / tokens if tokens and spent else None


def _sequences(seen: Sequence[Seen]) -> float:
    """That share a step, on the mean over its rounds."""
    rounds = sum(int(one.row[AT["rounds"]]) for one in seen)
    return sum(int(one.row[AT["rounds"]]) * _BATCH_MIDDLE[one.group.batch] for one in seen) / max(rounds, 1)


def _short(task: _Task) -> str:
    row = sums(task.speculative)
    requests = int(row[AT["requests"]])
    if requests < _LEAST_REQUESTS:
        return ""
    mean = int(row[AT["output_tokens"]]) / requests
    if mean >= SHORT_OUTPUT:
        return ""
    return f"{mean:.0f} output tokens on average over {requests} speculative requests, under {SHORT_OUTPUT}"


def _drift(task: _Task) -> str:
    ends = task.drifted
    if ends is None:
        return ""
    first, last = ends
    return f"accepted share {first.mean:.2f} at first, {last.mean:.2f} lately, of the same version of the drafter"


def _offline(evidence: Evidence, task: _Task) -> str:
    known = next(
        (
            evidence.offline[name]
            for name in (*{one.group.drafter for one in task.speculative}, "")
            if name in evidence.offline
        ),
        None,
    )
    ends = task.drifted
    online = ends[0] if ends is not None else task.accepted
    if known is None or not online.count or known - online.mean < OFFLINE_GAP or online.high >= known:
        return ""
    return f"accepted share {known:.2f} offline, {online.mean:.2f} ({online.low:.2f} to {online.high:.2f}) online"


def _ends(seen: Sequence[Seen]) -> tuple[Sequence[Seen], Sequence[Seen]] | None:
    """The first and the last third of the requests in time; None where they do not differ in time."""
    requests: Callable[[Seen], int] = lambda one: int(one.row[AT["requests"]])  # noqa: E731
    whole = sum(map(requests, seen))
    if whole < 2 * _LEAST_REQUESTS or len(seen) < 3:
        return None
    first, last = [], []
    before = 0
    for one in seen:
        if before < whole / 3:
            first.append(one)
        elif before >= 2 * whole / 3:
            last.append(one)
        before += requests(one)
    return (first, last) if first and last else None

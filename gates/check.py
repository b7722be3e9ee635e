"""The three gates, held against pairs of runs of the same requests: plain before, speculative after.

Each answers yes, no, or not shown: a bound lies on the wrong side of the mark. Only yes lets a pair through. *Memory* is
arithmetic. *Acceptance* asks for every task whether the lower bound of the accepted share is above what breaks even here, at this
load (round time over plain step, less one, over drafted tokens); where no cost could be measured the golden number stands in.
*Tail* asks whether P99 after is at most 1.05 of P99 before.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gates.bootstrap import Estimate, Floats, bootstrap, ratio_of_sums
from gates.capacity import FILL, Memory
from gates.evidence import Seen, blocks_of, sums
from gates.noise import Noise, beyond, noise_of
from gates.pairs import PairOfRuns, Verdict, column, count, decode_ratio, p99_ratio
from gates.plan import cost
from gates.tail_gate import ENOUGH_FOR_P99, FEWEST_FOR_TAIL, TAIL_LIMIT, WHOLE, TailGate, tail_gate
from router.ledger.sums import AT

GOLDEN_ACCEPTANCE = 0.60
SHORT_OUTPUT = 20
"""Tokens below which speculation has no room."""
TAIL_WORDS = "its slowest requests are slower than plain ones"
NOISY_WORDS = "within what plain decoding moved by itself"
_ROUND_TIMES = ("exposed_draft_ns", "network_ns", "wait_ns", "verify_ns")
FEWEST = 8
"""Requests of a task below which nothing is said about it: resampling fewer claims too much."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the pair beside its runs."""

    model: str = ""
    precision: str = ""
    device: str = ""
    numerics: str = ""
    law: str = ""
    drafter: str = ""
    drafter_version: str = ""
    tokenizer_shared: bool = True
    memory: Memory | None = None
    drafter_apart: bool = False
    """The drafter lies on a device of its own: it takes nothing from the target's."""
    sequences: int = 1
    """That the target shall hold at the same time."""
    load: int = 1
    """Streams at the same time while it was checked."""
    price_per_hour: float = 0.0
    traffic: str = ""
    traffic_path: str = ""
    """As it was given on the command line."""
    command: tuple[str, ...] = ()
    """That made this check, without what picks or repeats requests; empty: not made by one."""
    repeats: int = 1
    """Times that each request was decoded each way."""
    records: str = ""
    """Where the records of the requests lie."""
    picked: tuple[str, ...] = ()
    """Types of task that alone were checked."""
    simulated: str = ""
    """The simulated pair; empty: real devices."""
    started: bool = False
    """The pair was started for the check, and is gone."""
    gated: bool | None = None
    """Whether the router's rollout goes by checks (router.rollout.gate); None: not asked."""


@dataclass(frozen=True, slots=True)
class MemoryGate:
    """Weights and KV of all sequences at the P99 length, against 95 % of the device."""

    verdict: Verdict
    length: int
    sequences: int
    device_bytes: float
    plain_bytes: float
    used_bytes: float
    fit_before: int
    fit_after: int
    tokens_ratio: float | None
    """Tokens a second of a full device, after over before, if the speed measured at this load held."""
    cost_before: float | None
    cost_after: float | None
    words: str = ""


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """One type of task. ``share``: accepted over drafted tokens."""

    task: str
    requests: int
    share: Estimate | None
    needed: float
    measured: bool
    """Whether ``needed`` is the measured break-even rather than the golden number."""
    margin: Estimate | None
    """Share less what is needed, with what both are uncertain of."""
    acceptance: Verdict
    speed: Estimate | None
    tail: Estimate | None
    drafted_a_round: float
    short: float
    verdict: Verdict
    """Whether to speculate."""
    words: str
    noisy: bool = False
    """Something would be said, were it more than what plain decoding moved by itself."""

    @property
    def too_few(self) -> bool:
        """Whether its requests are too few to say anything."""
        return self.requests < FEWEST


@dataclass(frozen=True, slots=True)
class Check:
    """The page."""

    facts: Facts
    requests: int
    same: int
    memory: MemoryGate
    acceptance: Verdict
    tail: TailGate
    speed: Estimate | None
    tasks: tuple[TaskCheck, ...]
    short: float
    blocks: Mapping[tuple[int, bool], int]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    compared: int | None = None
    """Outputs that could be compared; None: of all requests."""
    noise: Noise = field(default_factory=Noise)

    @property
    def noisy(self) -> bool:
        """Whether a verdict was withheld because plain decoding moved by more than what was to be judged."""
        return bool(self.tail.noisy) or any(task.noisy for task in self.tasks)

    @property
    def num_compared(self) -> int:
        """Outputs that were compared."""
        return self.requests if self.compared is None else self.compared

    @property
    def same_output(self) -> bool:
        """Whether outputs are as the law promises: token by token under the coupled one, with numerics that allow it."""
        promised = self.facts.law == "coupled" and self.facts.numerics == "deterministic"
        return self.same == self.num_compared or not promised

    @property
    def holds(self) -> bool:
        """Whether all gates do."""
        gates = (self.memory.verdict, self.acceptance, self.tail.verdict)
        return self.requests > 0 and self.same_output and all(gate is Verdict.YES for gate in gates)


def judge(pairs: Sequence[PairOfRuns], facts: Facts, *, seconds: float = 0.0) -> Check:
    """Hold the gates against what was measured."""
    by_task: dict[str, list[PairOfRuns]] = {}
    for pair in pairs:
        by_task.setdefault(pair.speculative.group.task, []).append(pair)
    tasks = tuple(_task(name, of_task) for name, of_task in sorted(by_task.items()))
    lengths = [count(one, "prompt_tokens") + count(one, "output_tokens") for p in pairs for one in (p.plain,)]
    speed, noise = _speed(pairs), noise_of(pairs)
    return Check(
        facts=facts,
        requests=len(pairs),
        same=sum(pair.same for pair in pairs),
        memory=memory_gate(facts, lengths, speed, _tokens_s(pairs)),
        acceptance=all_of(task.acceptance for task in tasks if task.requests >= FEWEST),
        tail=tail_gate(pairs, noise),
        speed=speed,
        tasks=tasks,
        short=_short(pairs),
        blocks=blocks_of(pair.speculative for pair in pairs),
        notes=tuple(_notes(pairs, tasks, facts.picked)),
        seconds=seconds,
        noise=noise,
    )


# --- memory ---------------------------------------------------------------------------------------------------------


def memory_gate(facts: Facts, lengths: Sequence[int], speed: Estimate | None, tokens_s: float) -> MemoryGate:
    """Arithmetic, at the P99 of ``lengths``; ``tokens_s``: of one plain sequence."""
    length = math.ceil(np.quantile(lengths, 0.99, method="higher")) if lengths else 0
    known, sequences = facts.memory, facts.sequences
    if known is None or not known.device_bytes or not length:
        words = "no verify replica said what it takes of its device (--verify names one)"
        return MemoryGate(Verdict.OPEN, length, sequences, 0, 0, 0, 0, 0, None, None, None, words)
    drafter = not facts.drafter_apart
    used = known.used_bytes(sequences, length, drafter=drafter)
    before, after = (known.sequences(length, drafter=one) for one in (False, drafter))
    ratio = speed.value * after / before if speed is not None and before else None
    money = _costs(facts.price_per_hour, speed, before * tokens_s, after * tokens_s)
    return MemoryGate(
        Verdict.YES if used <= FILL * known.device_bytes else Verdict.NO,
        length,
        sequences,
        known.device_bytes,
        known.used_bytes(sequences, length, drafter=False),
        used,
        before,
        after,
        ratio,
        *money,
        words="the drafter lies on another device" if facts.drafter_apart else "",
    )


def _costs(
    price: float, speed: Estimate | None, before: float, after: float
) -> tuple[float | None, float | None]:
    """Of 1,000 tokens on a full device that gives so many plain tokens a second, before and after."""
    if speed is None:
        return None, None
    return cost(price, before), cost(price, after * speed.value)


def _tokens_s(pairs: Sequence[PairOfRuns]) -> float:
    """Of one plain sequence at this load."""
    seconds = sum(count(pair.plain, "decode_ns") for pair in pairs) * 1e-9
    return sum(count(pair.plain, "timed_tokens") for pair in pairs) / seconds if seconds else 0.0


# --- acceptance and effect, by task -----------------------------------------------------------------------------------


def _task(name: str, pairs: Sequence[PairOfRuns]) -> TaskCheck:
    rows = [pair.speculative.row for pair in pairs]
    row = sums(pair.speculative for pair in pairs)
    share = ratio_of_sums(column(rows, "accepted"), column(rows, "drafted"))
    measured = _margin(pairs)
    # What is needed is what is left of the share where the margin is taken off.
    needed = min(1.0, max(0.0, share.value - measured.value)) if share and measured else GOLDEN_ACCEPTANCE
    speed, noise = _speed(pairs), noise_of(pairs)
    tail = p99_ratio([pair.speculative for pair in pairs], [pair.plain for pair in pairs], WHOLE)
    rounds = max(1, int(row[AT["spec_rounds"]]))
    margin = measured or less(share, GOLDEN_ACCEPTANCE)
    drafted_a_round = int(row[AT["drafted"]]) / rounds
    acceptance = above(margin, 0.0) if len(pairs) >= FEWEST else Verdict.OPEN
    noisy = measured is not None and _within_noise(measured, share, drafted_a_round, noise)
    if noisy and acceptance is not Verdict.OPEN:
        acceptance = Verdict.OPEN
    else:
        noisy = False
    verdict, words = worth_it(len(pairs), acceptance, speed, tail, noise)
    return TaskCheck(
        task=name,
        requests=len(pairs),
        share=share,
        needed=needed,
        measured=measured is not None,
        margin=margin,
        acceptance=acceptance,
        speed=speed,
        tail=tail,
        drafted_a_round=drafted_a_round,
        short=_short(pairs),
        verdict=verdict,
        words=words,
        noisy=noisy or words == NOISY_WORDS,
    )


def _within_noise(margin: Estimate, share: Estimate | None, drafted: float, noise: Noise) -> bool:
    """Whether the margin is smaller than what it moves by where a plain step takes longer or shorter by the noise."""
    if share is None or not noise.speed or not drafted:
        return False
    needed = share.value - margin.value
    return abs(margin.value) <= noise.speed * (needed + 1 / drafted)


def _margin(pairs: Sequence[PairOfRuns]) -> Estimate | None:
    """Accepted share less break-even, both from the same resampled requests: costs are as uncertain as acceptance."""
    after, before = ([getattr(pair, way) for pair in pairs] for way in ("speculative", "plain"))
    rows, plain_rows = [one.row for one in after], [one.row for one in before]
    rounds, spent_ns = _asking(after)
    columns = [column(rows, "accepted"), column(rows, "drafted"), rounds, spent_ns]
    columns += [column(plain_rows, "decode_ns"), column(plain_rows, "timed_tokens")]

    def margin(drawn: Floats) -> Floats:
        accepted, drafted, asked, spent, plain, tokens = np.moveaxis(drawn.sum(axis=-2), -1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            # A round is never faster than a plain step: where it was measured so, that is noise, and no reserve.
            found: Floats = (accepted - np.maximum(spent * tokens / plain - asked, 0.0)) / drafted
        return found

    return bootstrap(np.stack(columns, axis=1), margin)


def _asking(seen: Sequence[Seen]) -> tuple[Floats, Floats]:
    """Rounds that asked a drafter, and their time, one entry a request; where rounds are not known all are taken."""
    if any(one.asked_rounds for one in seen):
        return np.array([float(one.asked_rounds) for one in seen]), np.array(
            [float(one.asked_ns) for one in seen]
        )
    rows = [one.row for one in seen]
    spent: Floats = np.sum([column(rows, name) for name in _ROUND_TIMES], axis=0)
    return column(rows, "rounds"), spent


def less(share: Estimate | None, needed: float) -> Estimate | None:
    """``share`` less a number that is known."""
    if share is None:
        return None
    return Estimate(share.low - needed, share.value - needed, share.high - needed, share.count)


def above(share: Estimate | None, needed: float) -> Verdict:
    """Whether a share is surely above, or surely under, what is needed."""
    if share is None:
        return Verdict.OPEN
    if share.low >= needed:
        return Verdict.YES
    return Verdict.NO if share.high < needed else Verdict.OPEN


def worth_it(
    requests: int,
    acceptance: Verdict,
    speed: Estimate | None,
    tail: Estimate | None,
    noise: Noise | None = None,
) -> tuple[Verdict, str]:
    """Whether to speculate for a task: its speed decides, acceptance explains; nothing within the noise does."""
    noise = noise or Noise()
    if requests < FEWEST or speed is None:
        return Verdict.OPEN, f"too few requests: {requests} of the {FEWEST} that are needed"
    sure = beyond(speed, 1.0, noise.speed)
    if speed.high < 1.0 and sure:
        return Verdict.NO, "slower than plain decoding"
    heavier = requests >= FEWEST_FOR_TAIL and tail is not None and tail.low > TAIL_LIMIT
    if heavier and tail is not None and beyond(tail, TAIL_LIMIT, noise.tails.get(WHOLE)):
        return Verdict.NO, TAIL_WORDS
    if acceptance is Verdict.NO:
        return Verdict.NO, "acceptance is under break-even"
    if not sure and (speed.low > 1.0 or speed.high < 1.0):
        return Verdict.OPEN, NOISY_WORDS
    if speed.low > 1.0:
        return Verdict.YES, "faster than plain decoding"
    return Verdict.OPEN, "neither faster nor slower can be shown: plain decoding loses nothing"


def _speed(pairs: Sequence[PairOfRuns]) -> Estimate | None:
    """Decode time of plain over that of speculative, same tokens: above 1 speculation is faster."""
    return decode_ratio([pair.plain for pair in pairs], [pair.speculative for pair in pairs])


# --- the rest -------------------------------------------------------------------------------------------------------


def _notes(pairs: Sequence[PairOfRuns], tasks: Sequence[TaskCheck], picked: Sequence[str]) -> list[str]:
    notes = []
    if picked:
        notes.append(
            f"only {', '.join(picked)}: where a check of these very requests picked it, they flatter it; take others"
        )
    if 0 < len(pairs) < ENOUGH_FOR_P99:
        notes.append(
            f"{len(pairs)} requests: to show that a P99 holds takes {ENOUGH_FOR_P99}, of which the slowest lies beyond it with 95 % "
            f"(1 - 0.99^n, for times of any distribution); that it does not, {FEWEST_FOR_TAIL}"
        )
    few = [f"{task.task} ({task.requests})" for task in tasks if task.requests < FEWEST]
    if few:
        notes.append(f"not judged, under {FEWEST} requests: {', '.join(few)}")
    unmeasured = [task.task for task in tasks if not task.measured and task.requests >= FEWEST]
    if unmeasured:
        notes.append(
            f"no round with a draft was timed for {', '.join(unmeasured)}: {GOLDEN_ACCEPTANCE:.2f} stands in for break-even"
        )
    short = [task.task for task in tasks if task.short > 0.5]
    if short:
        notes.append(
            f"most outputs of {', '.join(short)} are under {SHORT_OUTPUT} tokens: the router decodes such plainly"
        )
    return notes


def _short(pairs: Sequence[PairOfRuns]) -> float:
    return sum(count(pair.plain, "output_tokens") < SHORT_OUTPUT for pair in pairs) / max(1, len(pairs))


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Yes where all say yes, no where one says no; open without any."""
    found = list(verdicts)
    if not found:
        return Verdict.OPEN
    if Verdict.NO in found:
        return Verdict.NO
    return Verdict.OPEN if Verdict.OPEN in found else Verdict.YES

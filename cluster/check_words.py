"""A check as one page: sentences and figures that the terminal and the HTML page share."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.diagnose_words import histogram_lines
from gates.bimodal import shape_of
from gates.bootstrap import Estimate
from gates.check import FEWEST, GOLDEN_ACCEPTANCE, SHORT_OUTPUT, TAIL_LIMIT, Check, TaskCheck, Verdict

WIDTH = 80
_DO = {Verdict.YES: "speculate", Verdict.NO: "plain", Verdict.OPEN: "plain (open)"}


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate in words."""

    name: str
    verdict: Verdict
    question: str
    words: tuple[str, ...]


def conclusion(check: Check) -> str:
    """The first thing to read."""
    if check.holds:
        return "YES: all three gates hold. Speculation may be rolled out for this traffic."
    if not check.requests:
        return "NO: nothing was measured."
    if not check.same_output:
        return f"NO: {check.num_compared - check.same} of {check.num_compared} outputs differ from plain decoding. Do not roll out; report it."
    failed = [gate.name for gate in gates(check) if gate.verdict is Verdict.NO]
    unshown = [gate.name for gate in gates(check) if gate.verdict is Verdict.OPEN]
    words = []
    if failed:
        words.append(f"{_listed(failed)} {'fails' if len(failed) == 1 else 'fail'}")
    if unshown:
        words.append(f"{_listed(unshown)} {'is' if len(unshown) == 1 else 'are'} not shown to hold")
    return f"NO: {'; '.join(words)}. Do not roll out for all of this traffic."


def advice(check: Check) -> str:
    """What to do next."""
    good = [task.task for task in check.tasks if task.verdict is Verdict.YES]
    if check.holds and good:
        return f"Roll out for {_listed(good)}; `paceline rollout status` shows how it goes."
    if not check.same_output:
        return "Keep the records and run `paceline diagnose --records` on them."
    if check.memory.verdict is Verdict.NO:
        return "Lower verify.kv_slots or the longest context, or take a smaller drafter, then check again."
    if check.tail.verdict is Verdict.NO and _late_first(check):
        return (
            "It is the first token that comes late, as it does where a drafter reads long prompts beside the target: try one that "
            "only looks up (--drafter suffix), or a device of its own for the drafter."
        )
    if check.tail.verdict is Verdict.NO:
        return "Run `paceline diagnose` on the records, or the ledger: it says what kind of requests the tail is made of."
    others = [task for task in check.tasks if task.requests >= FEWEST and task.verdict is not Verdict.YES]
    if good and not others and check.memory.verdict is Verdict.OPEN:
        return "Say where a verify replica of the pair is (--verify host:port): it knows what the pair takes."
    if good and others:
        return (
            f"Check again with --task for {_listed(good)} alone: for the rest plain decoding loses nothing."
        )
    if good or any(task.verdict is Verdict.OPEN for task in check.tasks):
        return "Check again with more requests (100 and more a task), on a quieter machine or with --repeats 3; until then plain decoding loses nothing."
    return "Leave this traffic to plain decoding, or try another drafter (--drafter)."


def _late_first(check: Check) -> bool:
    """Whether the tail is one of first tokens rather than of the tokens behind them."""
    first, behind = (check.tail.others.get(name) for name in ("first token", "time a token"))
    return first is not None and first.value > TAIL_LIMIT and (behind is None or behind.value <= TAIL_LIMIT)


def gates(check: Check) -> tuple[Gate, Gate, Gate]:
    """All three."""
    return _memory(check), _acceptance(check), _tail(check)


def facts(check: Check) -> Iterator[tuple[str, str]]:
    """Name and value of what was checked."""
    known = check.facts
    yield "target", f"{known.model}, {known.precision} on {known.device}" if known.model else "not asked"
    yield (
        "drafter",
        f"{known.drafter} ({known.drafter_version or 'version not said'}), "
        + ("same tokenizer" if known.tokenizer_shared else "another tokenizer"),
    )
    yield (
        "law",
        f"{known.law}: "
        + (
            "the tokens of plain decoding"
            if known.law == "coupled"
            else "the distribution of plain decoding, not its tokens"
        ),
    )
    yield "numerics", known.numerics or "not asked"
    yield (
        "same output",
        f"{check.same} of {check.num_compared} requests, token by token"
        if check.num_compared
        else "not compared",
    )
    if check.num_compared:
        yield "short outputs", f"{check.short:.0%} under {SHORT_OUTPUT} tokens"
        yield "traffic", f"{known.traffic}; {check.requests} requests both ways, {known.load} at a time"
    else:
        yield "traffic", f"{known.traffic}: {check.requests:,} requests, speculative or plain by lot"


def page_lines(check: Check) -> Iterator[str]:
    """The page for a terminal of 80 columns."""
    yield from textwrap.wrap(conclusion(check), WIDTH)
    yield from textwrap.wrap(advice(check), WIDTH)
    yield ""
    for gate in gates(check):
        yield f"{gate.name.upper():<12}{gate.verdict.value.upper():<10}{gate.question}"
        for words in gate.words:
            yield from textwrap.wrap(words, WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 14)
    yield ""
    yield "by task      requests  accepted share    needs   speed over plain  do"
    for task in check.tasks:
        mark = "" if task.measured else "*"
        yield (
            f"{task.task:<17} {task.requests:>3}  {_narrow(task.share):<16}  {task.needed:>5.2f}{mark:<1}  "
            f"{_narrow(task.speed):<16}  {_DO[task.verdict]}"
        )
    yield from textwrap.wrap(
        "Accepted share: accepted over drafted tokens. Needs: the share at which a round with a draft is as fast as plain "
        f"decoding, measured here at this load (*: not measured, {GOLDEN_ACCEPTANCE:.2f} stands in), uncertain as well. Open: neither better nor worse could be "
        "shown. Intervals: 95 %.",
        WIDTH,
    )
    if check.blocks:
        shape = shape_of(check.blocks)
        yield ""
        yield "Accepted draft tokens of a round"
        yield from histogram_lines(check.blocks)
        if shape is not None:
            yield from textwrap.wrap(shape.words, WIDTH, initial_indent="  ", subsequent_indent="    ")
    yield ""
    for name, value in facts(check):
        yield from textwrap.wrap(f"{name:<15}{value}", WIDTH, subsequent_indent=" " * 15)
    for note in check.notes:
        yield from textwrap.wrap(f"note           {note}", WIDTH, subsequent_indent=" " * 15)


def _memory(check: Check) -> Gate:
    gate = check.memory
    question = "does the drafter fit beside the target and its sequences?"
    if gate.verdict is Verdict.OPEN:
        return Gate("memory", gate.verdict, question, (gate.words,))
    room = gate.device_bytes * 0.95
    words = [
        (
            f"{_size(gate.used_bytes)} of the {_size(room)} that may be used (95 % of {_size(gate.device_bytes)}), with "
            f"{gate.sequences} sequences of {gate.length:,} tokens (P99); without the drafter {_size(gate.plain_bytes)}"
        ),
        f"sequences that fit: {gate.fit_before:,} without the drafter -> {gate.fit_after:,} with it"
        + (f" ({gate.words})" if gate.words else ""),
    ]
    if gate.tokens_ratio is not None:
        money = (
            ""
            if gate.cost_before is None or gate.cost_after is None
            else f"; 1,000 tokens cost {gate.cost_before:.3g} -> {gate.cost_after:.3g}"
        )
        words.append(
            f"a full device gives {gate.tokens_ratio:.2f} times the tokens, if the speed measured here holds{money}"
        )
    return Gate("memory", gate.verdict, question, tuple(words))


def _acceptance(check: Check) -> Gate:
    question = "is enough of what is drafted accepted, for each task?"
    by_verdict = {
        verdict: [task.task for task in check.tasks if task.acceptance is verdict and task.requests >= FEWEST]
        for verdict in Verdict
    }
    words = []
    if by_verdict[Verdict.YES]:
        words.append(f"surely above break-even: {', '.join(by_verdict[Verdict.YES])}")
    if by_verdict[Verdict.NO]:
        words.append(f"surely under break-even: {', '.join(by_verdict[Verdict.NO])}")
    if by_verdict[Verdict.OPEN]:
        words.append(
            f"break-even lies within the interval, or nothing was drafted: {', '.join(by_verdict[Verdict.OPEN])}"
        )
    judged = [task for task in check.tasks if task.requests >= FEWEST and task.share is not None]
    golden = [task.task for task in judged if task.share is not None and task.share.low >= GOLDEN_ACCEPTANCE]
    if any(task.measured for task in judged):
        words.append(
            f"surely above {GOLDEN_ACCEPTANCE:.2f}, the figure often quoted: {', '.join(golden) or 'none'} (it decides only "
            "where break-even could not be measured)"
        )
    return Gate("acceptance", check.acceptance, question, tuple(words) or ("no task has enough requests",))


def _tail(check: Check) -> Gate:
    gate = check.tail
    question = f"is P99 after at most {TAIL_LIMIT:.2f} x P99 before?"
    if gate.total is None:
        return Gate(
            "tail",
            gate.verdict,
            question,
            ("see the notes" if gate.verdict is Verdict.NO else "too few requests",),
        )
    times = f"{gate.before_s:.2f} s -> {gate.after_s:.2f} s, " if gate.before_s else "the worst task's, "
    words = [
        (
            f"whole request: {times}ratio {_interval(gate.total)}; the upper bound must "
            f"not exceed {TAIL_LIMIT:.2f}"
        )
    ]
    words += [f"{name}: ratio {_interval(one)}" for name, one in gate.others.items()]
    if check.speed is not None:
        words.append(f"(on the mean decoding is {_interval(check.speed)} times as fast as plain)")
    return Gate("tail", gate.verdict, question, tuple(words))


def task_words(task: TaskCheck) -> str:
    """What to do for a task, and why."""
    return f"{_DO[task.verdict]}: {task.words}"


def interval(estimate: Estimate | None) -> str:
    """With its bounds."""
    return _interval(estimate)


def _interval(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def _narrow(estimate: Estimate | None) -> str:
    return _interval(estimate).replace(" to ", "-")


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

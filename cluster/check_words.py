"""A check as one page: sentences and figures that the terminal and the HTML page share."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.check_advice import advice, listed
from cluster.diagnose_words import histogram_lines
from cluster.words import counted
from gates.bimodal import shape_of
from gates.bootstrap import Estimate
from gates.capacity import FILL
from gates.check import FEWEST, GOLDEN_ACCEPTANCE, SHORT_OUTPUT, Check, TaskCheck
from gates.noise import Noise, against, beyond
from gates.pairs import Verdict
from gates.tail_gate import ENOUGH_FOR_P99, FEWEST_FOR_TAIL, TAIL_LIMIT, WHOLE

WIDTH = 80
_TAIL_HEADER = ("P99 of", "after over before", "asked", "noise", "so it")
_MARGIN = {
    Verdict.YES: "surely above 0",
    Verdict.NO: "surely below 0",
    Verdict.OPEN: "not farther from 0 than interval and noise reach",
}
_DO = {Verdict.YES: "speculate", Verdict.NO: "plain", Verdict.OPEN: "plain (open)"}


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate in words."""

    name: str
    verdict: Verdict
    question: str
    words: tuple[str, ...]
    table: tuple[tuple[str, ...], ...] = ()
    """Rows of figures, the first one their names."""


def outcome(check: Check) -> Verdict:
    """Of the whole: yes, shown to be worse, or neither."""
    if check.holds:
        return Verdict.YES
    failed = any(gate.verdict is Verdict.NO for gate in gates(check))
    return Verdict.NO if failed or not check.requests or not check.same_output else Verdict.OPEN


def conclusion(check: Check) -> str:
    """The first thing to read."""
    if check.holds:
        picked = (
            f" Only {listed(list(check.facts.picked))} was checked: if these very requests picked it, check others before you roll out."
            if check.facts.picked
            else ""
        )
        return f"YES: all three gates hold. Speculation may be rolled out for this traffic.{_capacity(check)}{picked}"
    if not check.requests:
        return "NO: nothing was measured."
    if not check.same_output:
        return f"NO: {check.num_compared - check.same} of {check.num_compared} outputs differ from plain decoding. Do not roll out; report it."
    failed = [gate.name for gate in gates(check) if gate.verdict is Verdict.NO]
    unshown = [gate.name for gate in gates(check) if gate.verdict is Verdict.OPEN]
    words = []
    if failed:
        words.append(f"{listed(failed)} {'fails' if len(failed) == 1 else 'fail'}")
    if check.tail.failing:
        words[-1] += f" ({_failing(check)})"
    if unshown:
        words.append(f"{listed(unshown)} {'is' if len(unshown) == 1 else 'are'} not shown to hold")
    if Verdict.OPEN is check.tail.verdict and (few := _too_few_for_tail(check)):
        words.append(few)
    if not failed:
        noisy = f"TOO NOISY TO JUDGE: {_moved(check)}. " if check.noisy else ""
        return f"{noisy}NOT SHOWN: {'; '.join(words)}. Nothing was shown to be worse either: do not roll out on this check."
    noisy = f" What else was to be judged is too noisy: {_moved(check)}." if check.noisy else ""
    return f"NO: {'; '.join(words)}. Do not roll out for this traffic as a whole{_parts(check)}.{noisy}"


def _capacity(check: Check) -> str:
    """What the drafter's memory takes away, where that is more than speculation gives."""
    ratio = check.memory.tokens_ratio
    if ratio is None or ratio >= 1.0:
        return ""
    return (
        f" But its memory leaves room for {check.memory.fit_after:,} sequences instead of {check.memory.fit_before:,}: a device that is "
        f"full gives {ratio:.2f} times the tokens."
    )


def _parts(check: Check) -> str:
    good = [task.task for task in check.tasks if task.verdict is Verdict.YES]
    others = [task.task for task in check.tasks if task.verdict is not Verdict.YES]
    if good and others and check.memory.verdict is not Verdict.NO:
        return f"; {listed(good)} may pass alone"
    return ", nor for any task of it"


def _moved(check: Check) -> str:
    """What plain decoding moved by itself, where that is what forbids to judge."""
    noise = check.noise
    found = [
        f"P99 of the {name} by {noise.tails[name]:.0%}" for name in check.tail.noisy if name in noise.tails
    ]
    noisy = [task.task for task in check.tasks if task.noisy]
    if noisy:
        found.append(
            f"the speed by up to {noise.speed or 0.0:.0%} over all (that of {listed(noisy)} cannot be judged)"
        )
    return (
        "the same requests decoded plainly twice differ from themselves by more than what is to be judged: "
        + ", ".join(found)
    )


def _failing(check: Check) -> str:
    return ", ".join(
        f"P99 of the {name} is {_interval(check.tail.lines[name])} times plain, the mark is {TAIL_LIMIT:.2f}"
        for name in check.tail.failing
    )


def _too_few_for_tail(check: Check) -> str:
    requests = check.tail.requests
    if requests is None or requests >= ENOUGH_FOR_P99:
        return ""
    return f"of the tail: {counted(requests, 'request')}, {ENOUGH_FOR_P99} are needed for a yes"


def gates(check: Check) -> tuple[Gate, Gate, Gate]:
    """All three."""
    return _memory(check), _acceptance(check), _tail(check)


def facts(check: Check) -> Iterator[tuple[str, str]]:
    """Name and value of what was checked."""
    known = check.facts
    yield "target", f"{known.model}, {known.precision} on {known.device}" if known.model else "not asked"
    if known.simulated:
        yield "devices", f"simulated ({known.simulated}): no figure here is one of real hardware"
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
    yield "noise", noise_words(check.noise)
    if check.num_compared:
        yield "short outputs", f"{check.short:.0%} under {SHORT_OUTPUT} tokens"
        yield "traffic", f"{known.traffic}; {check.requests} requests both ways, {known.load} at a time"
    else:
        yield "traffic", f"{known.traffic}: {counted(check.requests, 'request')}, speculative or plain by lot"


def noise_words(noise: Noise) -> str:
    """How far plain decoding moved from itself."""
    if not noise.known:
        return "not measured: no request was decoded plainly twice"
    tails = ", ".join(f"{name} {moved:.0%}" for name, moved in noise.tails.items())
    return (
        f"decoded plainly twice, the same requests differ from themselves by up to {noise.speed or 0.0:.0%} in speed"
        + (f"; P99: {tails}" if tails else "")
        + ". A verdict stands only on more than that"
    )


def page_lines(check: Check) -> Iterator[str]:
    """The page for a terminal of 80 columns."""
    yield from textwrap.wrap(conclusion(check), WIDTH)
    told = advice(check)
    yield from textwrap.wrap(told.words, WIDTH)
    if told.command:
        yield f"  $ {told.command}"
    yield ""
    for gate in gates(check):
        yield f"{gate.name.upper():<12}{gate.verdict.value.upper():<10}{gate.question}"
        for words in gate.words:
            yield from textwrap.wrap(words, WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 14)
        for row in gate.table:
            yield f"  {row[0]:<16}{row[1]:<21}{row[2]:<18}{row[3]:<7}{row[4]}".rstrip()
    yield ""
    yield "by task      requests  accepted share    needs   speed over plain  do"
    for task in check.tasks:
        mark = "" if task.measured else "*"
        yield (
            f"{task.task:<17} {task.requests:>3}  {_narrow(task.share):<16}  {task.needed:>5.2f}{mark:<1}  "
            f"{_narrow(task.speed):<16}  {do(task, check)}"
        )
        if task.measured and not task.too_few:
            yield f"{'':<17}      margin {_interval(task.margin)}: {_MARGIN[task.acceptance]}"
            if task.verdict is Verdict.OPEN:
                yield f"{'':<17}      speed: {task.words}"
    yield from textwrap.wrap(
        "Accepted share: accepted over drafted tokens. Needs: the share at which a round with a draft is as fast as plain "
        f"decoding, measured here at this load (*: not measured, {GOLDEN_ACCEPTANCE:.2f} stands in), uncertain as well: the margin between the two decides. Open: neither better nor worse could be "
        "shown. Do: by the task's own speed; it is rolled out only if all three gates hold (until then: not yet). Intervals: 95 %.",
        WIDTH,
    )
    if check.blocks:
        shape = shape_of(check.blocks)
        yield ""
        yield "Accepted draft tokens of a round"
        yield from histogram_lines(check.blocks, shares=shape is not None)
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
    room = gate.device_bytes * FILL
    words = [
        (
            f"{_size(gate.used_bytes)} of the {_size(room)} that may be used ({FILL:.0%} of {_size(gate.device_bytes)}), with "
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
        verdict: [task.task for task in check.tasks if task.acceptance is verdict and not task.too_few]
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
    judged = [task for task in check.tasks if not task.too_few and task.share is not None]
    golden = [task.task for task in judged if task.share is not None and task.share.low >= GOLDEN_ACCEPTANCE]
    if any(task.measured for task in judged):
        words.append(
            f"surely above {GOLDEN_ACCEPTANCE:.2f}, the figure often quoted: {', '.join(golden) or 'none'} (it decides only "
            "where break-even could not be measured)"
        )
    return Gate(
        "acceptance",
        check.acceptance,
        question,
        tuple(words) or (f"no task has the {FEWEST} requests that are needed",),
    )


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
    words = (
        [] if gate.before_s == 0 else [f"whole request: P99 {gate.before_s:.2f} s -> {gate.after_s:.2f} s"]
    )
    if gate.requests is not None and gate.requests < ENOUGH_FOR_P99 and gate.verdict is Verdict.OPEN:
        words.append(
            f"not shown: {counted(gate.requests, 'request')}, {ENOUGH_FOR_P99} are needed for a yes and {FEWEST_FOR_TAIL} for a no "
            "(repeats of one request count once)"
        )
    if check.speed is not None:
        words.append(f"(on the mean decoding is {_interval(check.speed)} times as fast as plain)")
    rows = [_tail_row(check, name, one) for name, one in gate.lines.items()]
    return Gate("tail", gate.verdict, question, tuple(words), (_TAIL_HEADER, *rows))


def _tail_row(check: Check, name: str, ratio: Estimate) -> tuple[str, ...]:
    """One time of the tail: ratio, mark, what plain decoding moved by itself, what follows."""
    said, whole = against(ratio, TAIL_LIMIT), name == WHOLE
    moved = check.noise.tails.get(name)
    shown = check.tail.verdict is Verdict.YES or (check.tail.requests or ENOUGH_FOR_P99) >= ENOUGH_FOR_P99
    if name in check.tail.failing:
        verdict = "FAILS"
    elif name in check.tail.noisy:
        verdict = "within noise"
    elif said is Verdict.NO or (whole and said is Verdict.YES and not shown):
        verdict = "too few"
    elif said is Verdict.YES and (whole or beyond(ratio, TAIL_LIMIT, moved)):
        verdict = "holds"
    else:
        verdict = "open" if whole else "not shown worse"
    return (
        name,
        _interval(ratio),
        f"shown <= {TAIL_LIMIT:.2f}" if whole else f"not shown > {TAIL_LIMIT:.2f}",
        "-" if moved is None else f"{moved:.0%}",
        verdict,
    )


def do(task: TaskCheck, check: Check) -> str:
    """What to do for a task, in a word: a task that is faster waits for the gates of the whole."""
    if task.too_few:
        return f"too few ({task.requests} of {FEWEST})"
    return "not yet" if task.verdict is Verdict.YES and not check.holds else _DO[task.verdict]


def rollout_lines(check: Check) -> Iterator[str]:
    """What the verdict changes, at the end of the page."""
    words = rollout_words(check)
    if words:
        yield from textwrap.wrap(f"{'rollout':<15}{words}", WIDTH, subsequent_indent=" " * 15)


def rollout_words(check: Check) -> str:
    """Whether anything goes by this verdict, and how to have it so; empty where nobody was asked."""
    if check.facts.started:
        return "the pair of this check is stopped: nobody was told"
    if check.facts.gated is None:
        return ""
    if not check.num_compared:
        return "a ledger was judged, no requests: nobody was told. A check of requests tells the router"
    if check.facts.gated:
        return "the router's gate is on: a task speculates after a check that passes, by steps (`paceline rollout status`)"
    return (
        "the router's gate is off (router.rollout.gate, the default): this verdict changes nothing by itself, and the router speculates "
        "by its own table meanwhile; `paceline policy plain` stops that. Start it with "
        "`paceline up --set router.rollout.gate=on` and check again, then a task speculates only after a check that passes"
    )


def task_words(task: TaskCheck, check: Check) -> str:
    """What to do for a task, and why."""
    if task.too_few:
        return task.words
    waits = ", but not all three gates hold" if do(task, check) == "not yet" else ""
    return f"{do(task, check)}: {task.words}{waits}"


def interval(estimate: Estimate | None) -> str:
    """With its bounds."""
    return _interval(estimate)


def _interval(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def _narrow(estimate: Estimate | None) -> str:
    return _interval(estimate).replace(" to ", "-")


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"

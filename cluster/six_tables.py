"""What six tasks gave, as tables that fit 80 columns, and why each was decoded so."""

import textwrap
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cluster.asking import tokens_per_s
from cluster.six_tasks import Comparison, Run
from cluster.waterfall import plan_in_words
from paceline.types import Mode


def print_all(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Both tables, the reasons, the conclusion."""
    _print_tables(console, comparisons)
    _print_reasons(console, comparisons)
    print_conclusion(console, comparisons)


def _print_tables(console: Console, comparisons: Sequence[Comparison]) -> None:
    """What each run gave, then where its time went: two tables that fit 80 columns."""
    results = _table("Six tasks", "task", "decoded", right=_RESULT_HEADINGS)
    times = _table("Where the time of these runs went", "task", right=_TIME_HEADINGS)
    for one in comparisons:
        for run in dict.fromkeys((one.automatic, one.speculative)):
            forced = run is not one.automatic
            plan, finished = plan_in_words(run.finished.plan), run.finished
            stats, spent = finished.speculative, finished.timings
            results.add_row(
                "" if forced else one.task.title,
                f"{'forced' if forced else ''} {plan.removeprefix('speculative ')}".strip(),
                str(finished.usage.completion_tokens),
                str(stats.num_rounds),
                _figure(_tokens_a_round(run)),
                _times(decode_ratio(one.plain, run)),
                _times(_total_ratio(one.plain, run)),
                "yes" if run.token_ids == one.plain.token_ids else "NO",
            )
            times.add_row(
                "  forced" if forced else one.task.title,
                _speed(one.plain),
                _speed(run),
                str(stats.num_spec_steps),
                _figure(stats.mean_acceptance_length),
                *(
                    f"{part * 1000:.0f}"
                    for part in (spent.draft_s, spent.network_s, spent.wait_s, spent.verify_s)
                ),
            )
    for table in (results, times):
        console.print()
        console.print(table)
    if any(one.speculative is not one.automatic for one in comparisons):
        console.print("forced: the router chose plain; speculation was asked for, to compare.")
        console.print("A plain row is the same decoding twice: its ratio is the machine's own noise.")
    console.print("ratio: speed over plain decoding; decode: behind the first token; total: all.")


_RESULT_HEADINGS = ("tokens", "rounds", "tokens\na round", "decode\nratio", "total\nratio", "same\noutput")
_TIME_HEADINGS = (
    "tokens/s\nplain",
    "tokens/s\nhere",
    "rounds\nwith a\nblock",
    "mean\naccepted\nlength",
    "draft\nms",
    "net\nms",
    "wait\nms",
    "verify\nms",
)


def _table(title: str, *left: str, right: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _print_reasons(console: Console, comparisons: Sequence[Comparison]) -> None:
    console.print("\n[bold]Why the router decided so[/bold]")
    for one in comparisons:
        plan = one.automatic.finished.plan
        words = f"{one.task.title}: {plan_in_words(plan)}, because {plan.reason}"
        for line in textwrap.wrap(words, console.width - 1, subsequent_indent="    "):
            console.print(line, markup=False)


def print_conclusion(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Over all rows, and what went wrong."""
    console.print()
    for words, runs in (
        ("automatic, as the router decided", [one.automatic for one in comparisons]),
        ("always speculative", [one.speculative for one in comparisons]),
    ):
        decode = _sum_ratio(comparisons, runs, lambda run: run.finished.timings.decode_s)
        total = _sum_ratio(comparisons, runs, lambda run: run.finished.timings.total_s)
        if decode and total:
            console.print(f"All six, {words}: {decode:.2f}x decode, {total:.2f}x total.")
    if any(one.automatic.finished.plan.mode is Mode.PLAIN for one in comparisons):
        console.print("A row decoded plainly counts as 1.00 there, whatever its noise.")
    for one in comparisons:
        if one.first_difference is not None:
            console.print(f"{one.task.title}: output differs from token {one.first_difference} on")
    traces = [one.speculative.started.trace_id for one in comparisons if one.speculative.started.trace_id]
    if traces:
        console.print(
            f"Traces go to the collector that the settings name, if it listens; the last one is {traces[-1]}."
        )


def _sum_ratio(
    comparisons: Sequence[Comparison], runs: Sequence[Run], time_of: Callable[[Run], float]
) -> float | None:
    """Over all; what was decoded plainly both times takes as long both times, but for the machine's noise."""
    plain_s = sum(time_of(one.plain) for one in comparisons)
    spent_s = sum(
        time_of(one.plain if run.finished.plan.mode is Mode.PLAIN else run)
        for one, run in zip(comparisons, runs, strict=True)
    )
    return plain_s / spent_s if spent_s > 0 else None


def _tokens_a_round(run: Run) -> float | None:
    """The prefill's token left out."""
    rounds = run.finished.speculative.num_rounds
    return (run.finished.usage.completion_tokens - 1) / rounds if rounds else None


def _total_ratio(plain: Run, other: Run) -> float | None:
    """From arrival to the end; the outputs are as long as each other, so times compare."""
    slow, fast = plain.finished.timings.total_s, other.finished.timings.total_s
    return slow / fast if fast > 0 else None


def decode_ratio(plain: Run, other: Run) -> float | None:
    """Speed over plain decoding, in decode time."""
    slow, fast = tokens_per_s(plain.finished), tokens_per_s(other.finished)
    return fast / slow if slow and fast else None


def _speed(run: Run) -> str:
    speed = tokens_per_s(run.finished)
    return "-" if speed is None else f"{speed:.1f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

"""The main job of ``make run``: the stack under Ray, six real prompts, each decoded plainly and speculatively.

Tokens stream as they come; then two tables say what was decoded how, what it was worth, where the time went, and that
the token ids are the same, and a list says why each task was decoded so. The exit code is 1 when ids differ. All fits
80 columns; COLUMNS sets another width.
"""

import argparse
import asyncio
import secrets
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.cli import print_waterfalls, settings_in_words, tokens_per_s
from cluster.launch import running_cluster
from cluster.progress import Progress, progress_on
from cluster.waterfall import plan_in_words
from paceline.client import Chunk, Client, Finished, Started, generate_request
from paceline.config import load_config
from paceline.errors import ConfigError, EngineError, PacelineError
from paceline.types import Mode

MAX_TOKENS = 48
FORCED_DRAFTER, FORCED_K = "ngram", 4
"""Where the router decides for plain decoding, speculation is shown beside it with these."""


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and what kind of work it is."""

    title: str
    prompt: str


TASKS = (
    Task(
        "summarise",
        "Summarise the text in two sentences.\n\n"
        "The harbour of Lindholm froze in January for the first time in forty years. Fishing boats stayed in port "
        "for three weeks, and the fish market closed its doors. The town paid every crew a small daily sum so that "
        "nobody had to sell a boat. When the ice broke in February, the first boat to leave was the oldest one, the "
        "Maren, built in 1931.",
    ),
    Task(
        "extract to JSON",
        "Extract the order as JSON with the keys customer, item, quantity, city.\n\n"
        "Text: Ingrid Solberg from Trondheim ordered 12 wool blankets.\n"
        'JSON: {"customer": "Ingrid Solberg", "item": "wool blankets", "quantity": 12, "city": "Trondheim"}\n\n'
        "Text: Tomas Novak from Brno ordered 30 copper kettles.\nJSON:",
    ),
    Task(
        "rewrite",
        "Rewrite the text without spelling mistakes. Change nothing else.\n\n"
        "Text: The workshop opens on 4 March and closses on 9 March. Registration for the workshop ends on "
        "20 February. The fee for the workshop is 40 euros and includes lunch on both days.",
    ),
    Task(
        "question answering",
        "Answer the question from the text.\n\n"
        "Text: The Alma bridge was planned by the engineer Rosa Quint and opened in 1908. It is 212 metres long and "
        "carries two tram lines. Its four stone towers were rebuilt after the flood of 1951.\n\n"
        "Question: Who planned the Alma bridge, and how long is it?",
    ),
    Task(
        "code",
        "Rename the function to rolling_mean. Give the complete code.\n\n"
        "```python\n"
        "def moving_average(values, window):\n"
        "    total = sum(values[:window])\n"
        "    averages = [total / window]\n"
        "    for index in range(window, len(values)):\n"
        "        total += values[index] - values[index - window]\n"
        "        averages.append(total / window)\n"
        "    return averages\n"
        "```",
    ),
    Task(
        "creative writing",
        "Write the opening of a short story about a lighthouse keeper who receives a letter from the future.",
    ),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One decoding of one prompt."""

    started: Started
    finished: Finished
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A task decoded plainly, as the router decides, and speculatively; the last two may be one run."""

    task: Task
    plain: Run
    automatic: Run
    speculative: Run

    @property
    def first_difference(self) -> int | None:
        """Index of the first output token that differs between the runs; None when all are the same."""
        for other in (self.automatic.token_ids, self.speculative.token_ids):
            if other != self.plain.token_ids:
                pairs = zip(self.plain.token_ids, other, strict=False)
                shorter = min(len(self.plain.token_ids), len(other))
                return next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 same output everywhere, 1 not, or the stack failed; 2 wrong settings."""
    parser = argparse.ArgumentParser(prog="python -m cluster.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, help="topology and settings, TOML")
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="tokens of each answer")
    arguments = parser.parse_args(argv)
    console = Console(highlight=False)
    any_port = [f"{tier}.server.port=0" for tier in ("draft", "verify", "router")]
    try:
        config = load_config(arguments.config, [*any_port, *arguments.overrides])
        with (
            progress_on(console) as progress,
            running_cluster(config, progress=progress, keep_logs=True) as cluster,
        ):
            print(f"Router {cluster.router_address}, model {config.model.name}, logs {cluster.log_dir}")
            print(settings_in_words(config, cluster))
            return asyncio.run(_show(cluster.router_address, console, progress, arguments.max_tokens))
    except ConfigError as error:
        console.print(str(error), markup=False)
        return 2
    except PacelineError as error:
        console.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; nothing of it runs any more.")
        return 130


async def _show(address: str, console: Console, progress: Progress, max_tokens: int) -> int:
    async with Client(address) as client:
        progress("warming up")
        await _decode(client, TASKS[-1].prompt, 4, mode=Mode.SPECULATIVE)
        progress("")
        comparisons = [await _compare(client, task, console, max_tokens) for task in TASKS]
        _print_tables(console, comparisons)
        _print_reasons(console, comparisons)
        _print_conclusion(console, comparisons)
        best = max(comparisons, key=lambda one: _ratio(one.plain, one.speculative) or 0.0)
        summaries = await client.list_requests(request_id=best.speculative.started.request_id)
    console.print(f"\nOne request round by round ({best.task.title}), as `paceline trace` shows it:\n")
    print_waterfalls(summaries, width=console.width)
    return 0 if all(one.first_difference is None for one in comparisons) else 1


async def _compare(client: Client, task: Task, console: Console, max_tokens: int) -> Comparison:
    console.print()
    console.rule(task.title, align="left", characters="-")
    plain = await _decode(
        client, task.prompt, max_tokens, mode=Mode.PLAIN, console=console, label="asked for:"
    )
    automatic = await _decode(client, task.prompt, max_tokens, console=console, label="automatic:")
    speculative = automatic
    if automatic.finished.plan.mode is Mode.PLAIN:
        speculative = await _decode(
            client, task.prompt, max_tokens, mode=Mode.SPECULATIVE, console=console, label="asked for:"
        )
    return Comparison(task, plain, automatic, speculative)


async def _decode(
    client: Client,
    prompt: str,
    max_tokens: int,
    *,
    mode: Mode | None = None,
    console: Console | None = None,
    label: str = "",
) -> Run:
    """One answer, streamed to ``console`` as it comes."""
    forced = mode is Mode.SPECULATIVE
    request = generate_request(
        messages=[("user", prompt)],
        temperature=0.0,
        max_tokens=max_tokens,
        tenant=secrets.token_hex(8),  # a prompt in memory from the run before would flatter the second one
        mode=mode,
        drafter=FORCED_DRAFTER if forced else None,
        k=FORCED_K if forced else None,
    )
    started: Started | None = None
    finished: Finished | None = None
    token_ids: list[int] = []
    async for event in client.generate(request):
        match event:
            case Started():
                started = event
                if console:
                    reason = f" ({event.plan.reason})" if mode is None else ""
                    decision = escape(plan_in_words(event.plan) + reason)
                    console.print(f"[bold]{label}[/bold] [dim]{decision}[/dim]")
            case Chunk():
                token_ids += event.token_ids
                if console:
                    console.out(event.text, end="", highlight=False)
            case Finished():
                finished = event
                if console:
                    console.out("")
    if started is None or finished is None:
        raise EngineError("the stream had no beginning or no end")
    return Run(started, finished, tuple(token_ids))


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
                _times(_ratio(one.plain, run)),
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
    console.print("ratio: speed over plain decoding of the same prompt; total: the whole request.")


_RESULT_HEADINGS = ("tokens", "rounds", "tokens\na round", "ratio\ndecode", "ratio\ntotal", "same\noutput")
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


def _print_conclusion(console: Console, comparisons: Sequence[Comparison]) -> None:
    console.print()
    for words, runs in (
        ("automatic, as the router decided", [one.automatic for one in comparisons]),
        ("always speculative", [one.speculative for one in comparisons]),
    ):
        decode = _sum_ratio(comparisons, runs, lambda run: run.finished.timings.decode_s)
        total = _sum_ratio(comparisons, runs, lambda run: run.finished.timings.total_s)
        if decode and total:
            console.print(f"All six, {words}: {decode:.2f}x decode, {total:.2f}x total.")
    for one in comparisons:
        if one.first_difference is not None:
            console.print(f"{one.task.title}: output differs from token {one.first_difference} on")
    traces = [one.speculative.started.trace_id for one in comparisons if one.speculative.started.trace_id]
    if traces:
        console.print(f"Traces were exported, for example {traces[-1]}.")


def _sum_ratio(
    comparisons: Sequence[Comparison], runs: Sequence[Run], time_of: Callable[[Run], float]
) -> float | None:
    plain_s, spent_s = sum(time_of(one.plain) for one in comparisons), sum(map(time_of, runs))
    return plain_s / spent_s if spent_s > 0 else None


def _tokens_a_round(run: Run) -> float | None:
    """The prefill's token left out."""
    rounds = run.finished.speculative.num_rounds
    return (run.finished.usage.completion_tokens - 1) / rounds if rounds else None


def _total_ratio(plain: Run, other: Run) -> float | None:
    """From arrival to the end; the outputs are as long as each other, so times compare."""
    slow, fast = plain.finished.timings.total_s, other.finished.timings.total_s
    return slow / fast if fast > 0 else None


def _ratio(plain: Run, other: Run) -> float | None:
    slow, fast = tokens_per_s(plain.finished), tokens_per_s(other.finished)
    return fast / slow if slow and fast else None


def _speed(run: Run) -> str:
    speed = tokens_per_s(run.finished)
    return "-" if speed is None else f"{speed:.1f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())

"""The main job of ``make run``: the stack under Ray, six real prompts, each decoded plainly and speculatively.

Tokens stream as they come; then a table says what the router decided and why, what speculation was worth, where the
time went, and that the token ids are the same. The exit code is 1 when they are not.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.cli import print_waterfalls, tokens_per_s
from cluster.launch import Progress, running_cluster
from cluster.waterfall import plan_in_words
from paceline.client import Chunk, Client, Finished, Started, generate_request
from paceline.config import load_config
from paceline.errors import ConfigError, EngineError, PacelineError
from paceline.types import Mode

MAX_TOKENS = 48
FORCED_DRAFTER, FORCED_K = "ngram", 4
"""Where the router decides for plain decoding, speculation is shown beside it with these."""
LOG_WIDTH = 140
"""Columns of the table where the output is not a terminal."""


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
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=LOG_WIDTH)
    any_port = [f"{tier}.server.port=0" for tier in ("draft", "verify", "router")]
    try:
        config = load_config(arguments.config, [*any_port, *arguments.overrides])
        with _progress(console) as progress, running_cluster(config, progress=progress) as cluster:
            progress("")
            console.print(
                f"router {cluster.router_address}, model {config.model.name}, logs {cluster.log_dir}"
            )
            return asyncio.run(_show(cluster.router_address, console, progress, arguments.max_tokens))
    except ConfigError as error:
        console.print(str(error), markup=False)
        return 2
    except PacelineError as error:
        console.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


async def _show(address: str, console: Console, progress: Progress, max_tokens: int) -> int:
    async with Client(address) as client:
        progress("warming up")
        await _decode(client, TASKS[-1].prompt, 4, mode=Mode.SPECULATIVE)
        progress("")
        comparisons = [await _compare(client, task, console, max_tokens) for task in TASKS]
        console.print()
        console.print(_table(comparisons))
        _print_conclusion(console, comparisons)
        best = max(comparisons, key=lambda one: _ratio(one.plain, one.speculative) or 0.0)
        summaries = await client.list_requests(request_id=best.speculative.started.request_id)
    console.print(f"\nOne request, round by round ({best.task.title}); `paceline trace` shows any other:\n")
    print_waterfalls(summaries)
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


def _table(comparisons: Sequence[Comparison]) -> Table:
    table = Table(
        title="Six tasks, plain and speculative",
        caption="times: sums over the speculative run's rounds",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        expand=True,
    )
    table.add_column("task", min_width=10)
    table.add_column("decision and reason", min_width=26)
    for heading in (
        "tokens",
        "rounds",
        "mean\naccepted\nlength",
        "tokens/s\nplain",
        "tokens/s\nspecul.",
        "ratio",
        "draft\nms",
        "network\nms",
        "wait\nms",
        "verify\nms",
        "same\noutput",
    ):
        table.add_column(heading, justify="right")
    for one in comparisons:
        plan, run = one.automatic.finished.plan, one.speculative.finished
        stats, spent = run.speculative, run.timings
        length = stats.mean_acceptance_length
        table.add_row(
            one.task.title,
            escape(f"{plan_in_words(plan)}: {plan.reason}"),
            str(run.usage.completion_tokens),
            str(stats.num_rounds),
            "-" if length is None else f"{length:.2f}",
            _speed(one.plain),
            _speed(one.speculative),
            _times(_ratio(one.plain, one.speculative)),
            *(
                f"{part * 1000:.0f}"
                for part in (spent.draft_s, spent.network_s, spent.wait_s, spent.verify_s)
            ),
            "yes" if one.first_difference is None else "NO",
        )
    return table


def _print_conclusion(console: Console, comparisons: Sequence[Comparison]) -> None:
    plain_s = sum(one.plain.finished.timings.decode_s for one in comparisons)
    for words, spent_s in (
        ("always speculative", sum(one.speculative.finished.timings.decode_s for one in comparisons)),
        (
            "automatic, as the router decided",
            sum(one.automatic.finished.timings.decode_s for one in comparisons),
        ),
    ):
        if spent_s > 0:
            console.print(f"All six, {words}: {plain_s / spent_s:.2f} times the speed of plain decoding.")
    for one in comparisons:
        if one.first_difference is not None:
            console.print(f"{one.task.title}: output differs from token {one.first_difference} on")
    traces = [one.speculative.started.trace_id for one in comparisons if one.speculative.started.trace_id]
    if traces:
        console.print(f"Traces were exported, for example {traces[-1]}.")


def _ratio(plain: Run, other: Run) -> float | None:
    slow, fast = tokens_per_s(plain.finished), tokens_per_s(other.finished)
    return fast / slow if slow and fast else None


def _speed(run: Run) -> str:
    speed = tokens_per_s(run.finished)
    return "-" if speed is None else f"{speed:.1f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """Says what is being waited for: a spinner on a terminal, lines with the time elsewhere. "" ends it."""
    started = time.monotonic()
    status = console.status("") if console.is_terminal else None

    def say(text: str) -> None:
        if status is None:
            if text:
                console.print(f"[{time.monotonic() - started:5.1f} s] {text}", markup=False)
        elif text:
            status.update(text)
            status.start()
        else:
            status.stop()

    try:
        yield say
    finally:
        if status is not None:
            status.stop()


if __name__ == "__main__":
    sys.exit(main())

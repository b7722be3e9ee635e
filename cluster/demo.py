"""The main job of ``make run``: the stack under Ray, six real prompts, each decoded plainly and speculatively.

Tokens stream as they come; then two tables say what was decoded how, what it was worth, where the time went, and that
the token ids are the same, and a list says why each task was decoded so. The exit code is 1 when ids differ. All fits
80 columns; COLUMNS sets another width.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported late, so that Ctrl-C in the first second is answered with a word, too
    from rich.console import Console

    from cluster.progress import Progress

MAX_TOKENS = 48
NO_LOTS = ("router.holdout=0", "router.guard.first_share=0")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 same output everywhere, 1 not, or the stack failed; 2 wrong settings; 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m cluster.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, help="topology and settings, TOML")
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="tokens of each answer")
    try:
        return _run(parser.parse_args(argv))
    except KeyboardInterrupt:
        print("\nInterrupted; nothing of it runs any more.")
        return 130


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from cluster.cli import settings_in_words
    from cluster.launch import running_cluster
    from cluster.progress import progress_on
    from paceline.config import load_config
    from paceline.errors import ConfigError, PacelineError

    console = Console(highlight=False)
    any_port = [f"{tier}.server.port=0" for tier in ("draft", "verify", "router")]
    try:
        # No lots: each of the six is decoded as the router decides for its kind.
        config = load_config(arguments.config, [*any_port, *NO_LOTS, *arguments.overrides])
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


async def _show(address: str, console: "Console", progress: "Progress", max_tokens: int) -> int:
    from cluster.cli import print_waterfalls
    from cluster.six_tables import decode_ratio, print_all
    from cluster.six_tasks import TASKS, compare, decode
    from paceline.client import Client
    from paceline.types import Mode

    async with Client(address) as client:
        progress("warming up")
        await decode(client, TASKS[-1].prompt, 4, mode=Mode.SPECULATIVE)
        progress("")
        comparisons = [await compare(client, task, console, max_tokens) for task in TASKS]
        print_all(console, comparisons)
        best = max(comparisons, key=lambda one: decode_ratio(one.plain, one.speculative) or 0.0)
        summaries = await client.list_requests(request_id=best.speculative.started.request_id)
    console.print(f"\nOne request round by round ({best.task.title}), as `paceline trace` shows it:\n")
    print_waterfalls(summaries, width=console.width)
    return 0 if all(one.first_difference is None for one in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())

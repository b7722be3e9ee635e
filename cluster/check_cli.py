"""``paceline check``: the three gates, on a team's own traffic."""

import asyncio
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.options import DEFAULT_ADDRESS, Address, beside, given, write_file
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from gates.check import Check

EXIT_NOT_HELD = 1
_SUFFIXES = (".html", ".json", ".jsonl")
_MOST = 1e9
"""Gigabytes, or money an hour: more is a slip, and no number for JSON."""
_PICKING = frozenset({"task", "limit", "repeats"})
"""Options that another check of the same pair would give anew."""


def add_check(app: typer.Typer, errors: Callable[[], AbstractContextManager[None]]) -> None:
    """Adds the command to ``app``; ``errors`` turns our errors into words and exit codes."""

    @app.command()
    def check(
        context: typer.Context,
        traffic: Annotated[
            Path | None,
            typer.Argument(
                help="Requests, one JSON object a line: text, messages, turns or raw; task_type, max_tokens, ..."
            ),
        ] = None,
        ledger: Annotated[
            Path | None,
            typer.Option(help="Instead of a file: what a ledger has seen, speculative against the holdout."),
        ] = None,
        address: Address = DEFAULT_ADDRESS,
        verify: Annotated[
            str,
            typer.Option(
                "--verify",
                "-v",
                help="host:port of its verify replica; default: the usual port of the router's host.",
            ),
        ] = "",
        start: Annotated[
            bool, typer.Option("--start", help="Start a pair for it, and stop it afterwards.")
        ] = False,
        config: Annotated[
            Path | None, typer.Option("--config", "-c", help="With --start: its settings, TOML.")
        ] = None,
        overrides: Annotated[
            list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="With --start: one setting.")
        ] = None,
        simulate: Annotated[str, typer.Option(metavar="PAIR", help="With --start: simulated devices.")] = "",
        drafter: Annotated[str, typer.Option(help="Check this drafter; default: the router's choice.")] = "",
        task: Annotated[
            list[str] | None,
            typer.Option(
                help="Only requests of this task, named in the file or told by the router; repeat for more."
            ),
        ] = None,
        limit: Annotated[
            int, typer.Option(min=0, help="At most so many requests, evenly over the file; 0: all.")
        ] = 0,
        max_tokens: Annotated[int, typer.Option(min=1, help="Output of requests that do not say.")] = 96,
        load: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 1,
        repeats: Annotated[
            int, typer.Option(min=1, help="Times each request is decoded each way; the median counts.")
        ] = 1,
        sequences: Annotated[
            int, typer.Option(min=0, help="Sequences to hold at the same time; 0: as many as are set.")
        ] = 0,
        device_gb: Annotated[
            float,
            typer.Option(
                min=0, max=_MOST, help="Memory to reckon with instead of the device's, in 10^9 bytes."
            ),
        ] = 0.0,
        price: Annotated[
            float, typer.Option(min=0, max=_MOST, help="Of an hour of the hardware, in any currency.")
        ] = 0.0,
        record: Annotated[
            bool,
            typer.Option("--record/--no-record", help="Tell a running router what its rollout may go by."),
        ] = True,
        report: Annotated[
            Path | None,
            typer.Option(
                help="Where HTML, JSON and records go: this name with .html, .json and .jsonl. Default: paceline-check, with --ledger "
                "paceline-check-ledger."
            ),
        ] = None,
    ) -> None:
        """Hold memory, acceptance and tail against a file of requests; exit status 0 only if all three gates hold."""
        with errors():
            from rich.console import Console

            from cluster.check_page import as_json, html
            from cluster.check_words import page_lines, rollout_lines
            from cluster.progress import progress_on
            from paceline.simulation import MODEL_NAME as SIMULATED

            base = report_name(
                report or Path("paceline-check" if ledger is None else "paceline-check-ledger"),
                reads=[path for path in (traffic, ledger, config) if path is not None],
            )
            with progress_on(Console(stderr=True, highlight=False)) as say, contextlib.ExitStack() as stack:
                router, replica = address, verify or beside(address)
                if (traffic is None) == (ledger is None):
                    raise ConfigError("give either a file of requests or --ledger")
                if ledger is not None and written(base, ".jsonl").exists():
                    raise ConfigError(
                        f"{written(base, '.jsonl')}: records of another check lie there, and a ledger has none; name another --report"
                    )
                if (config or overrides or simulate) and not start:
                    raise ConfigError("--config, --set and --simulate need --start")
                lines = () if traffic is None else lines_of(traffic)
                if start:
                    router, replica = stack.enter_context(_started(config, overrides or [], simulate, say))
                known = {"sequences": sequences, "device_gb": device_gb, "price": price}
                checking = (
                    from_ledger(ledger, router, replica, task or [], known)
                    if traffic is None
                    else checked(
                        router,
                        replica,
                        traffic,
                        lines,
                        task or [],
                        limit,
                        load,
                        max_tokens,
                        drafter,
                        say,
                        known | {"repeats": repeats},
                    )
                )
                found, records = asyncio.run(checking)
                found = dataclasses.replace(
                    found,
                    facts=dataclasses.replace(
                        found.facts,
                        simulated=simulate or (SIMULATED if found.facts.model == SIMULATED else ""),
                        started=start,
                        command=tuple(given(context, but=_PICKING)),
                        traffic_path=str(traffic or ""),
                        repeats=repeats,
                        records=str(written(base, ".jsonl")) if records else "",
                        gated=None if start else asyncio.run(gate_of(address)),
                    ),
                )
            write_file(written(base, ".html"), html(found))
            write_file(written(base, ".json"), as_json(found))
            if records:
                write_file(
                    written(base, ".jsonl"),
                    "".join(json.dumps(one) + "\n" for one in records),
                    private=True,
                )
            told = record and not start and traffic is not None and asyncio.run(tell(address, found))
            for line in page_lines(found):
                typer.echo(line)
            typer.echo("")
            typer.echo(f"page           {written(base, '.html')}")
            typer.echo(f"figures        {written(base, '.json')}")
            if records:
                typer.echo(
                    f"records        {written(base, '.jsonl')}: token ids, no text; for `paceline diagnose --records`"
                )
            if told:
                typer.echo(f"told           the router: {told}")
            for line in rollout_lines(found):
                typer.echo(line)
            if not found.holds:
                raise typer.Exit(EXIT_NOT_HELD)


def report_name(report: Path, *, reads: Sequence[Path]) -> Path:
    """What the report's files are called but for their suffix. Raises ConfigError, before anything is measured in vain.

    One of the suffixes at its end is left off, no other: ``run.1`` and ``run.2`` are two reports. ``reads``: files that must not be
    written over.
    """
    for path in (report, *reads):
        str(path).encode()  # names stand on the page: those that are no text are refused here
    base = report.with_suffix("") if report.suffix in _SUFFIXES else report
    if not base.name.strip("."):
        raise ConfigError(f"--report {str(report)!r}: expected the name of a file")
    for suffix in _SUFFIXES:
        path = written(base, suffix)
        _refuse_own_input(path, reads)
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(
                f"cannot write {path}: "
                + ("a directory is called so" if path.is_dir() else f"no directory {path.parent}")
            )
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"cannot write {path}: not allowed")
    return base


def written(base: Path, suffix: str) -> Path:
    """One of the report's files."""
    return base.with_name(base.name + suffix)


def _refuse_own_input(path: Path, reads: Sequence[Path]) -> None:
    for read in reads:
        if path.resolve() == read.resolve() or (path.exists() and read.exists() and path.samefile(read)):
            raise ConfigError(f"--report would write {path} over {read}, which is read; name another")


def lines_of(traffic: Path) -> tuple[str, ...]:
    """A file of requests, read once: it may be a pipe. Raises ConfigError for all that shows before a server is there to name its tasks."""
    from gates.traffic import read_traffic

    try:
        with traffic.open(encoding="utf-8") as file:
            lines = tuple(file)
        read_traffic(lines, None)
    except OSError as error:
        raise ConfigError(f"cannot read {traffic}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{traffic}: {error}") from error
    return lines


async def checked(
    router: str,
    replica: str,
    traffic: Path,
    lines: Sequence[str],
    tasks: list[str],
    limit: int,
    load: int,
    max_tokens: int,
    drafter: str,
    say: Callable[[str], None],
    known: dict[str, Any],
) -> "tuple[Check, tuple[dict[str, Any], ...]]":
    """Runs and judges. ``lines`` are those of ``traffic``, of which only the name is needed here."""
    from cluster.check_run import facts_of, memory_of, of_tasks, run_pairs
    from cluster.words import counted, show
    from gates.check import judge
    from gates.tail_gate import ENOUGH_FOR_P99
    from gates.traffic import read_traffic, spread
    from paceline.client import Client

    started = time.monotonic()
    async with Client(router) as client:
        types = (await client.server_info()).task_types
        try:
            requests = read_traffic(lines, types)
        except ValueError as error:
            raise ConfigError(f"{traffic}: {error}") from error
        unknown = sorted(set(tasks) - {*types, "unsure"})
        if unknown:
            raise ConfigError(f"--task {', '.join(unknown)}: expected some of {', '.join(types)}")
        if (await memory_of(replica, ""))[0] is None:
            # Said now: it makes the memory gate fail, and the requests may take many minutes.
            words = f"{replica}: no verify replica there says what it holds, so the memory gate will not hold; --verify names another one"
            show([words], err=True)
        in_file = len(requests)
        if tasks:
            requests = await of_tasks(client, requests, tasks, load=load, progress=say)
        if len(requests) < 2:
            of_task = f" of task {', '.join(tasks)}, of {in_file} in the file" if tasks else ""
            raise ConfigError(
                f"{traffic}: {counted(len(requests), 'request')} to check{of_task}; give at least 2, better {ENOUGH_FOR_P99}"
            )
        requests = spread(requests, limit)
        runs = await run_pairs(
            client,
            requests,
            load=load,
            repeats=known["repeats"],
            max_tokens=max_tokens,
            drafter=drafter,
            progress=say,
        )
        memory, apart, slots = await memory_of(replica, runs.drafter)
        if memory is not None and known["device_gb"]:
            memory = dataclasses.replace(memory, device_bytes=known["device_gb"] * 1e9)
        facts = await facts_of(
            client,
            runs,
            memory=memory,
            drafter_apart=apart,
            sequences=known["sequences"] or slots,
            load=load,
            price_per_hour=known["price"],
            traffic=traffic.name,
            picked=tuple(tasks),
        )
    return judge(runs.pairs, facts, seconds=time.monotonic() - started), runs.records


async def from_ledger(
    ledger: Path | None, router: str, replica: str, tasks: list[str], known: dict[str, Any]
) -> "tuple[Check, tuple[dict[str, Any], ...]]":
    """Judges what a ledger has seen; the server is asked for its memory only, where it is there."""
    from cluster.check_run import memory_of
    from cluster.ledger_file import read_ledger
    from gates.check import Facts
    from gates.check_ledger import judge_ledger
    from paceline.client import Client
    from paceline.errors import PacelineError

    assert ledger is not None, "one of the two is given"
    found = read_ledger(ledger)
    rows = [(cell.group, row) for cell, row in found.rows if not tasks or cell.group.task in tasks]
    groups = [group for group, _ in rows if group.drafter]
    drafters = sorted({group.drafter for group in groups})
    facts = Facts(
        law=", ".join(sorted({group.law for group in groups if group.law})),
        drafter=", ".join(drafters),
        traffic=ledger.name,
        price_per_hour=known["price"],
    )
    with contextlib.suppress(PacelineError):
        memory, apart, slots = await memory_of(replica, drafters[0] if len(drafters) == 1 else "")
        if memory is not None and known["device_gb"]:
            memory = dataclasses.replace(memory, device_bytes=known["device_gb"] * 1e9)
        async with Client(router) as client:
            model = (await client.server_info()).model
        facts = dataclasses.replace(
            facts,
            memory=memory,
            drafter_apart=apart,
            sequences=known["sequences"] or slots,
            model=model.name,
            precision=model.dtype,
            device=model.device,
            numerics=model.numerics,
        )
    return judge_ledger(rows, found.documents.get("holdout", "[]"), facts), ()


async def gate_of(address: str) -> bool | None:
    """Whether the router's rollout goes by checks; None where nobody tells."""
    from paceline.client import Client
    from paceline.errors import PacelineError

    with contextlib.suppress(PacelineError):
        async with Client(address) as client:
            return bool((await client.rollout()).gated)
    return None


async def tell(address: str, found: "Check") -> str:
    """Says to the router's rollout what the check allows; what was said, in words. Only a check that holds lets tasks in."""
    from cluster.words import counted
    from gates.pairs import Verdict
    from paceline.client import Client
    from paceline.v1 import router_pb2

    note = f"check of {counted(found.requests, 'request')} of {found.facts.traffic}"
    passed = [task for task in found.tasks if found.holds and task.verdict is Verdict.YES]
    failed = [task for task in found.tasks if task.verdict is Verdict.NO]
    orders = [
        router_pb2.RolloutOrder(
            task=task.task,
            drafter=found.facts.drafter,
            action=action,
            note=_printable(f"{note}: {task.words}"),
        )
        for tasks, action in (
            (passed, router_pb2.ROLLOUT_ACTION_PASSED),
            (failed, router_pb2.ROLLOUT_ACTION_FAILED),
        )
        for task in tasks
    ]
    if not orders:
        return ""
    async with Client(address) as client:
        await client.set_rollout(orders)
    words = [
        f"{', '.join(task.task for task in tasks)} {what}"
        for tasks, what in ((passed, "passed"), (failed, "did not pass"))
        if tasks
    ]
    return "; ".join(words)


def _printable(note: str) -> str:
    """For the router, which takes no other; a file may be called anything."""
    return "".join(character if character.isprintable() else " " for character in note)


@contextlib.contextmanager
def _started(
    config: Path | None, overrides: list[str], simulate: str, say: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    """A pair of its own on free ports; its router's and its verify replica's address."""
    from cluster.launch import running_cluster
    from cluster.simulated import simulated
    from paceline.config import load_config

    ports = [f"{tier}.server.port=0" for tier in ("router", "verify", "draft")]
    pair = simulated(simulate) if simulate else []
    settings = load_config(config, [*ports, *pair, *overrides])
    with running_cluster(settings, progress=say) as cluster:
        yield cluster.router_address, cluster.addresses("verify")[0]

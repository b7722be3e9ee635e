"""``paceline``: start the stack, ask it something, see where the time went.

Heavy imports (Ray, torch's side of the house) happen inside the commands that need them: everything else answers at
once. Exit codes: 0 done, 1 the server failed, 2 wrong input or settings, 3 the server is not there or has no room,
130 interrupted.
"""

import asyncio
import contextlib
import errno
import io
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.check_cli import add_check
from cluster.diagnose_cli import add_diagnose
from cluster.options import DEFAULT_ADDRESS, DEFAULT_VERIFY_ADDRESS, Address
from cluster.plan_cli import add_plan
from cluster.policy_cli import policy_app
from cluster.replay_cli import replay_command
from cluster.rollout_cli import rollout_app
from cluster.words import show
from paceline import __version__
from paceline.errors import (
    CapacityError,
    ConfigError,
    FieldViolation,
    InvalidRequestError,
    PacelineError,
    PeerLostError,
)
from paceline.types import Law

if TYPE_CHECKING:
    from cluster.launch import Cluster
    from paceline.client import RequestSummary
    from paceline.config import PacelineConfig

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_UNAVAILABLE, EXIT_INTERRUPTED = 1, 2, 3, 130
SAMPLE = "Write a Python function that checks whether a word is a palindrome."
"""Of a type of task that speculates, with an answer long enough for it."""
WATCH_S = 2.0
"""How often ``up`` looks whether a tier was restarted."""

app = typer.Typer(
    help="Speculative decoding served in tiers: same output, never worse than plain, explainable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="Models in the local cache.", no_args_is_help=True)
app.add_typer(model_app, name="model")


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show is no failure
    app()


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False,
) -> None:
    """Speculative decoding served in tiers: same output, never worse than plain, explainable."""
    if version:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.command()
def up(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Topology and settings, TOML; default: built in.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One setting, for example verify.kv_slots=8."),
    ] = None,
    simulate: Annotated[
        str,
        typer.Option(
            metavar="PAIR",
            help="Simulated devices instead of models: 8b+1b, 70b+1b or 27b+block; nothing is downloaded.",
        ),
    ] = "",
) -> None:
    """Start draft, verify and router under Ray; stop them with Ctrl-C."""
    with _errors():
        from rich.console import Console

        from cluster.launch import running_cluster
        from cluster.progress import progress_on
        from cluster.simulated import simulated
        from paceline.config import load_config

        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # while starting, like Ctrl-C: take all down again
        started = time.monotonic()
        settings = load_config(config, [*(simulated(simulate) if simulate else ()), *(overrides or ())])
        settings = settings if simulate else with_ledger_file(settings)
        with (
            progress_on(Console(stderr=True, highlight=False)) as say,
            running_cluster(settings, progress=say, keep_logs=True) as cluster,
        ):
            typer.echo(f"All tiers serve, after {time.monotonic() - started:.1f} s.")
            typer.echo(settings_in_words(settings, cluster, simulate))
            typer.echo(f"Ledger: {asyncio.run(_ledger(cluster.router_address))}")
            if cluster.log_dir:
                typer.echo(f"Logs, kept after the stop, too: {cluster.log_dir}")
            pids = cluster.pids()
            for tier in cluster.tiers:
                port = tier.replica.server.metrics_on
                metrics = f", /metrics on port {port}" if port else ""
                typer.echo(
                    f"  {tier.replica.name:<10} {tier.address:<22} pid {pids[tier.replica.name]}{metrics}"
                )
            where = (
                "" if cluster.router_address == DEFAULT_ADDRESS else f" --address {cluster.router_address}"
            )
            typer.echo(f'Try: paceline generate "{SAMPLE}" --stats{where}')
            typer.echo(
                f"Ctrl-C stops: requests in flight get up to {cluster.drain_s:g} s (drain_s), once more stops at once."
            )
            _until_stopped(cluster, pids)
            _note("draining; once more to stop at once")
        if cluster.log_dir:
            _note(f"stopped; logs in {cluster.log_dir}")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: Address = DEFAULT_ADDRESS,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw", help="As a user's turn in the model's chat template, or the text as it is."
        ),
    ] = True,
    system: Annotated[str, typer.Option(help="The system's turn before the prompt; with --chat only.")] = "",
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Only so many likeliest tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Only the likeliest tokens of this mass.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Only tokens at least so likely, relative to the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens seen before get rarer.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Off the logit of every token put out before.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, once for each time it was put out.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Key of the draw; default: the server picks one.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Decode without a drafter; default: the server decides.")
    ] = False,
    speculative: Annotated[
        bool,
        typer.Option(
            "--speculative",
            help="Decode speculatively, whatever the server would choose; the next three say so, too.",
        ),
    ] = False,
    drafter: Annotated[str | None, typer.Option(help="Decode speculatively with this drafter.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Most draft tokens a round.")] = None,
    law: Annotated[
        Law | None, typer.Option(help="How drafts are accepted; default: the server's setting.")
    ] = None,
    task: Annotated[str, typer.Option(help="Type of task; default: classified from the prompt.")] = "",
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; repeat for more.")
    ] = None,
    tenant: Annotated[
        str, typer.Option(help="Whose request it is; memory is reused within one tenant.")
    ] = "",
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0,
    stats: Annotated[bool, typer.Option("--stats", help="Say in detail where the time went.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End standard output with one line of JSON: ids, plan, figures.")
    ] = False,
) -> None:
    """Stream an answer to standard output, then one line of figures to standard error."""
    with _errors():
        from cluster.asking import ask
        from paceline.types import Mode

        wrong = []
        asked = speculative or drafter is not None or k is not None or law is not None
        if plain and asked:
            wrong.append(
                FieldViolation(
                    "--plain", "means no drafter: leave out --speculative, --drafter, --k and --law"
                )
            )
        if system and not chat:
            wrong.append(FieldViolation("--system", "needs the chat template: leave out --raw"))
        text = sys.stdin.read() if prompt == "-" else prompt
        told = [("system", system)] if system else []
        fields: dict[str, Any] = {
            "text": None if chat else text,
            "messages": [*told, ("user", text)] if chat else None,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
            "max_tokens": max_tokens,
            "stop": stop or (),
            "task_type": task,
            "mode": Mode.PLAIN if plain else Mode.SPECULATIVE if asked else None,
            "drafter": None if plain else drafter,
            "k": None if plain else k,
            "law": None if plain else law,
            "tenant": tenant,
            "priority": priority,
        }
        asyncio.run(ask(address, fields, wrong, stats=stats, as_json=as_json))


@app.command()
def trace(
    request_id: Annotated[str, typer.Argument(help="A request by its id; default: the last ones.")] = "",
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many of the last requests.")] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Most rounds to draw of each; the others are summed up.")
    ] = 40,
    all_rounds: Annotated[
        bool, typer.Option("--all", help="Draw all rounds that are remembered (512 of each request).")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Show the rounds of the last requests as a waterfall: draft, network, wait, verify."""
    with _errors():
        requests = asyncio.run(_list_requests(address, request_id, last))
        if not requests:
            raise PacelineError(
                f"no request {request_id!r} is remembered" if request_id else "no requests yet"
            )
        print_waterfalls(requests, sys.maxsize if all_rounds else rounds)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="A request by its id; default: the last one.")] = "",
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Say why a request was decoded as it was."""
    with _errors():
        from cluster.decision_words import explained

        requests = asyncio.run(_list_requests(address, request_id, 1))
        if not requests:
            raise PacelineError(
                f"no request {request_id!r} is remembered" if request_id else "no requests yet"
            )
        show(explained(requests[0]))


@app.command()
def info(address: Address = DEFAULT_ADDRESS) -> None:
    """Show what a server serves."""
    with _errors():
        asyncio.run(_info(address))


@app.command()
def costs(
    address: Annotated[
        str, typer.Option("--verify", "-v", help="host:port of a verify replica.")
    ] = DEFAULT_VERIFY_ADDRESS,
) -> None:
    """Show what a step of the target model costs, by sequences and rows."""
    with _errors():
        from cluster.cost_table import cost_lines

        for line in asyncio.run(cost_lines(address)):
            typer.echo(line)


@model_app.command("prepare")
def prepare(name: Annotated[str, typer.Argument(help="Registry name, for example smollm2.")]) -> None:
    """Fetch and convert a model into the cache, once."""
    with _errors():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        from paceline.model_store import prepare_model

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            tasks: dict[str, int] = {}

            def show(step: str, fraction: float) -> None:
                if step not in tasks:
                    tasks[step] = progress.add_task(step, total=1.0)
                    if not console.is_terminal:
                        _note(step)
                progress.update(tasks[step], completed=fraction)  # type: ignore[arg-type]

            path = prepare_model(name, progress=show)
        typer.echo(f"{name} is ready: {path}")


def with_ledger_file(config: "PacelineConfig") -> "PacelineConfig":
    """With a file for the ledger where none is named: what was learnt about a model outlives the stack."""
    from paceline.model_store import cache_dir

    ledger = config.router.ledger
    if ledger.path or ledger.endpoint:
        return config
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", config.model.name).strip("-")
    ledger = ledger.model_copy(update={"path": str(cache_dir() / "ledger" / f"{name}.sqlite")})
    return config.model_copy(update={"router": config.router.model_copy(update={"ledger": ledger})})


def settings_in_words(config: "PacelineConfig", cluster: "Cluster", simulate: str = "") -> str:
    """The settings that differ from the defaults, or from those of a simulated pair, and where all of them stand."""
    from cluster.launch import SETTINGS_FILE
    from cluster.simulated import simulated
    from paceline.config import load_config
    from router.plan import STAND_INS

    usual = f"those of --simulate {simulate}" if simulate else "the defaults"
    changed = config.changed_toml_lines(load_config(None, simulated(simulate)) if simulate else None)
    lines = ["Settings: " + (usual if not changed else f"{usual}, but")]
    lines += [f"  {line}" for line in changed]
    if not (config.router.plans or config.router.drafters or set(STAND_INS) & set(config.draft.drafters)):
        lines.append(
            f"  none of the drafters {', '.join(STAND_INS)}, so only requests that name a drafter are drafted for:\n"
            "    settings that name a drafter name all of them, see docs/drafters.md"
        )
    if cluster.log_dir:
        lines.append(f"  all of them: {cluster.log_dir / SETTINGS_FILE}")
    return "\n".join(lines)


def print_waterfalls(
    requests: Sequence["RequestSummary"], max_rounds: int | None = None, *, width: int | None = None
) -> None:
    """Each request's rounds, scaled to the terminal (or ``width``), an empty line between two."""
    from cluster import waterfall

    max_rounds = waterfall.MAX_ROUNDS if max_rounds is None else max_rounds
    width = width or shutil.get_terminal_size((100, 24)).columns
    encoding = sys.stdout.encoding or "ascii"
    try:
        waterfall.BLOCKS.encode(encoding)
        glyphs = waterfall.BLOCKS
    except UnicodeEncodeError:
        glyphs = waterfall.ASCII
    for index, request in enumerate(requests):
        if index:
            print()
        for line in waterfall.draw(request, width=width, glyphs=glyphs, max_rounds=max_rounds):
            print(line.encode(encoding, "replace").decode(encoding))


async def _list_requests(address: str, request_id: str, limit: int) -> tuple["RequestSummary", ...]:
    from paceline.client import Client

    async with Client(address) as client:
        return await client.list_requests(request_id=request_id, limit=limit)


async def _ledger(address: str) -> str:
    """Where the ledger is and what it goes on from: what was learnt and said before still decides."""
    from cluster.policy_words import ledger_in_words
    from paceline.client import Client

    async with Client(address) as client:
        try:
            return ledger_in_words(await client.policy(audit_limit=1))
        except PacelineError as error:  # the stack serves all the same
            return f"not to be asked now ({error})"


async def _info(address: str) -> None:
    from paceline.client import Client

    async with Client(address) as client:
        server = await client.server_info()
    model = server.model
    drafters = ", ".join(
        f"{one.name} ({one.version}{'' if one.available else ', not there now'})" for one in server.drafters
    )
    lines = (
        ("address", address),
        ("version", server.version),
        ("model", f"{model.name}, {model.dtype} on {model.device}, context {model.max_context}"),
        ("runner", f"{model.runner}: {model.runner_reason}"),
        ("numerics", model.numerics),
        ("drafters", drafters or "none"),
        ("task types", ", ".join(server.task_types)),
        ("max tokens", f"{server.default_max_tokens} where a request gives none"),
        ("running", str(server.running)),
    )
    show(f"{key:<11}{value}" for key, value in lines)


def _until_stopped(cluster: "Cluster", pids: dict[str, int]) -> None:
    """Returns on the first SIGINT or SIGTERM; says meanwhile when Ray has restarted a tier."""
    stopped = threading.Event()

    def stop(_number: int, _frame: object) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while not stopped.wait(WATCH_S):
        for name, pid in cluster.pids(timeout_s=WATCH_S).items():
            if pid != pids[name]:
                _note(f"{name} ended and was started again: pid {pids[name]}, now {pid}")
                pids[name] = pid


def _note(text: str) -> None:
    typer.echo(text, err=True)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Our own errors become words and an exit code; anything else is a fault of ours and keeps its traceback."""
    try:
        yield
    except InvalidRequestError as error:
        for violation in error.violations:
            _note(f"{violation.field}: {violation.description}")
        raise typer.Exit(EXIT_WRONG_INPUT) from error
    except ConfigError as error:
        _note(f"paceline: {error}")
        raise typer.Exit(EXIT_WRONG_INPUT) from error
    except (PeerLostError, CapacityError) as error:
        hint = " (is `paceline up` running?)" if str(error).endswith("nobody listens there") else ""
        _note(f"paceline: {error}{hint}; worth another try in {error.retry_after_s:g} s")
        raise typer.Exit(EXIT_UNAVAILABLE) from error
    except PacelineError as error:
        _note(f"paceline: {error}")
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error
    except UnicodeError as error:  # arguments, or standard input, that are no UTF-8
        _note(f"paceline: what was given is no Unicode text: {getattr(error, 'reason', error)}")
        raise typer.Exit(EXIT_WRONG_INPUT) from error
    except BrokenPipeError as error:  # `paceline generate ... | head`
        sys.stderr.close()
        raise typer.Exit(EXIT_FAILED) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _note(f"paceline: cannot write: {error.strerror}")
        raise typer.Exit(EXIT_FAILED) from error


app.add_typer(policy_app(_errors), name="policy")
app.command("replay")(replay_command(_errors))
add_plan(app, _errors)
add_diagnose(app, _errors)
add_check(app, _errors)
app.add_typer(rollout_app(_errors), name="rollout")

"""``paceline``: start the stack, ask it something, see where the time went.

Heavy imports (Ray, torch's side of the house) happen inside the commands that need them: everything else answers at
once. Exit codes: 0 done, 1 the server failed, 2 wrong input or settings, 3 the server is not there or has no room,
130 interrupted.
"""

import asyncio
import contextlib
import io
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline import __version__
from paceline.errors import CapacityError, ConfigError, InvalidRequestError, PacelineError, PeerLostError

if TYPE_CHECKING:
    from cluster.launch import Cluster
    from paceline.client import Finished, RequestSummary
    from paceline.v1.router_pb2 import GenerateRequest

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_UNAVAILABLE, EXIT_INTERRUPTED = 1, 2, 3, 130
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

Address = Annotated[
    str, typer.Option("--address", "-a", envvar="PACELINE_ADDRESS", help="host:port of the router.")
]
DEFAULT_ADDRESS = "127.0.0.1:7440"


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
) -> None:
    """Start draft, verify and router under Ray; stop them with Ctrl-C."""
    with _errors():
        from cluster.launch import running_cluster
        from paceline.config import load_config

        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # while starting, like Ctrl-C: take all down again
        started = time.monotonic()
        with running_cluster(load_config(config, overrides or ()), progress=_note) as cluster:
            typer.echo(
                f"All tiers serve, after {time.monotonic() - started:.1f} s. Logs: {cluster.log_dir or 'on the nodes'}"
            )
            pids = cluster.pids()
            for name, address in zip(cluster.names, cluster.all_addresses, strict=True):
                typer.echo(f"  {name:<10} {address:<22} pid {pids[name]}")
            where = (
                "" if cluster.router_address == DEFAULT_ADDRESS else f" --address {cluster.router_address}"
            )
            typer.echo(f'Try: paceline generate "Why is the sky blue?"{where}')
            _until_stopped(cluster, pids)
            _note("draining; once more to stop at once")


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
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Key of the draw; default: the server picks one.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Decode without a drafter; default: the server decides.")
    ] = False,
    drafter: Annotated[str | None, typer.Option(help="Decode speculatively with this drafter.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Most draft tokens a round.")] = None,
    task: Annotated[str, typer.Option(help="Type of task; default: classified from the prompt.")] = "",
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; repeat for more.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say in detail where the time went.")] = False,
) -> None:
    """Stream an answer to standard output, then one line of figures to standard error."""
    with _errors():
        from paceline.client import generate_request
        from paceline.types import Mode

        if plain and (drafter is not None or k is not None):
            raise InvalidRequestError.single("--plain", "means no drafter: leave out --drafter and --k")
        text = sys.stdin.read() if prompt == "-" else prompt
        mode = Mode.PLAIN if plain else Mode.SPECULATIVE if drafter is not None or k is not None else None
        try:
            request = generate_request(
                text=None if chat else text,
                messages=[("user", text)] if chat else None,
                temperature=temperature,
                seed=seed,
                max_tokens=max_tokens,
                stop=stop or (),
                task_type=task,
                mode=mode,
                drafter=drafter,
                k=k,
            )
        except ValueError as error:  # numbers that the wire cannot carry
            raise InvalidRequestError.single("options", str(error)) from error
        asyncio.run(_generate(address, request, stats=stats))


@app.command()
def trace(
    request_id: Annotated[str, typer.Argument(help="A request by its id; default: the last ones.")] = "",
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many of the last requests.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Most rounds to draw of each.")] = 512,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Show the rounds of the last requests as a waterfall: draft, network, wait, verify."""
    with _errors():
        requests = asyncio.run(_list_requests(address, request_id, last))
        if not requests:
            raise PacelineError(
                f"no request {request_id!r} is remembered" if request_id else "no requests yet"
            )
        print_waterfalls(requests, rounds)


@app.command()
def info(address: Address = DEFAULT_ADDRESS) -> None:
    """Show what a server serves."""
    with _errors():
        asyncio.run(_info(address))


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


def print_waterfalls(requests: Sequence["RequestSummary"], max_rounds: int = 512) -> None:
    """Each request's rounds, scaled to the terminal, an empty line between two."""
    from cluster import waterfall

    width = shutil.get_terminal_size((100, 24)).columns
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


def figures(finished: "Finished") -> str:
    """One line: what was decoded, how, how fast."""
    from cluster.waterfall import plan_in_words

    timings, usage, stats = finished.timings, finished.usage, finished.speculative
    parts = [
        plan_in_words(finished.plan),
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens",
        f"first after {timings.time_to_first_token_s:.2f} s",
    ]
    speed = tokens_per_s(finished)
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if stats.draft_acceptance_rate is not None and stats.mean_acceptance_length is not None:
        parts.append(
            f"accepted {stats.draft_acceptance_rate:.0%}, {stats.mean_acceptance_length:.2f} tokens a block"
        )
    parts.append(f"ended by {finished.finish_reason.value}")
    if finished.resumed:
        parts.append(f"resumed {finished.resumed} times")
    return " · ".join(parts)


def tokens_per_s(finished: "Finished") -> float | None:
    """Decoding speed, the prefill's token left out; None for a single token."""
    decoded = finished.usage.completion_tokens - 1
    return decoded / finished.timings.decode_s if decoded > 0 and finished.timings.decode_s > 0 else None


async def _generate(address: str, request: "GenerateRequest", *, stats: bool) -> None:
    from cluster.waterfall import plan_in_words, stats_in_words
    from paceline.client import Chunk, Client, Finished, Started

    line_open = False
    try:
        async with Client(address) as client, contextlib.aclosing(client.generate(request)) as events:
            async for event in events:
                match event:
                    case Started() if stats:
                        _note(f"request {event.request_id}, task {event.task_type}, seed {event.seed}")
                        _note(f"plan: {plan_in_words(event.plan)}, {event.plan.reason}")
                    case Chunk():
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
                        line_open = True
                    case Finished():
                        finished = event
    finally:  # an error gets a line of its own
        if line_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
    _note(figures(finished))
    if stats:
        _note(stats_in_words(finished.speculative))
        _note(_timings_in_words(finished))


def _timings_in_words(finished: "Finished") -> str:
    spent = finished.timings
    return (
        f"ms: queue {spent.queue_s * 1e3:.1f}, prefill {spent.prefill_s * 1e3:.1f}, "
        f"decode {spent.decode_s * 1e3:.1f} (draft {spent.draft_s * 1e3:.1f}, "
        f"network {spent.network_s * 1e3:.1f}, wait {spent.wait_s * 1e3:.1f}, "
        f"verify {spent.verify_s * 1e3:.1f}, overhead {spent.overhead_s * 1e3:.1f}); numerics {finished.numerics}"
    )


async def _list_requests(address: str, request_id: str, limit: int) -> tuple["RequestSummary", ...]:
    from paceline.client import Client

    async with Client(address) as client:
        return await client.list_requests(request_id=request_id, limit=limit)


async def _info(address: str) -> None:
    from paceline.client import Client

    async with Client(address) as client:
        server = await client.server_info()
    model = server.model
    drafters = ", ".join(
        f"{one.name} ({one.version}{'' if one.available else ', not there now'})" for one in server.drafters
    )
    for key, value in (
        ("address", address),
        ("version", server.version),
        ("model", f"{model.name}, {model.dtype} on {model.device}, context {model.max_context}"),
        ("runner", f"{model.runner}: {model.runner_reason}"),
        ("numerics", model.numerics),
        ("drafters", drafters or "none"),
        ("task types", ", ".join(server.task_types)),
        ("max tokens", f"{server.default_max_tokens} where a request gives none"),
        ("running", str(server.running)),
    ):
        typer.echo(f"{key:<11}{value}")


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
        _note(f"paceline: {error}")
        raise typer.Exit(EXIT_UNAVAILABLE) from error
    except PacelineError as error:
        _note(f"paceline: {error}")
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error
    except BrokenPipeError as error:  # `paceline generate ... | head`
        sys.stderr.close()
        raise typer.Exit(EXIT_FAILED) from error

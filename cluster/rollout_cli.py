"""``paceline rollout``: how far speculation is rolled out, and what an operator says to that."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from typing import Annotated, Any

import typer

from cluster.options import DEFAULT_ADDRESS, Address
from cluster.words import clock, show
from paceline.v1 import router_pb2

Task = Annotated[str, typer.Argument(help="Type of task.")]
Drafter = Annotated[
    str, typer.Option(help="With this drafter; default: the one that automatic mode prefers.")
]
Note = Annotated[str, typer.Option(help="Why, shown by status.")]
Share = Annotated[float, typer.Option(min=0, max=1, help="Of its requests, 0 to 1.")]
_BAR = 20


def rollout_app(errors: Callable[[], AbstractContextManager[None]]) -> typer.Typer:
    """The sub-commands; ``errors`` turns our errors into words and exit codes."""
    app = typer.Typer(help="How far speculation is rolled out, by type of task.", no_args_is_help=True)

    def run(work: Coroutine[Any, Any, None]) -> None:
        with errors():
            asyncio.run(work)

    @app.command()
    def status(address: Address = DEFAULT_ADDRESS) -> None:
        """Show the share of each type of task that speculates, why, and what moved."""
        run(_status(address))

    @app.command("set")
    def set_(
        task: Task, share: Share, drafter: Drafter = "", note: Note = "", address: Address = DEFAULT_ADDRESS
    ) -> None:
        """Go on from a share; windows of requests move it from there."""
        run(_order(address, router_pb2.ROLLOUT_ACTION_SET, task, drafter, note, share))

    @app.command()
    def allow(
        task: Task,
        share: Share = 1.0,
        drafter: Drafter = "",
        note: Note = "",
        address: Address = DEFAULT_ADDRESS,
    ) -> None:
        """Override: this share speculates without a check, whatever windows show (the guard still stands)."""
        run(_order(address, router_pb2.ROLLOUT_ACTION_ALLOW, task, drafter, note, share))

    @app.command()
    def stop(task: Task, drafter: Drafter = "", note: Note = "", address: Address = DEFAULT_ADDRESS) -> None:
        """Back to zero, until another check or order."""
        run(_order(address, router_pb2.ROLLOUT_ACTION_STOP, task, drafter, note))

    @app.command()
    def clear(task: Task, drafter: Drafter = "", note: Note = "", address: Address = DEFAULT_ADDRESS) -> None:
        """Take an override away: as if never checked."""
        run(_order(address, router_pb2.ROLLOUT_ACTION_CLEAR, task, drafter, note))

    return app


def status_lines(rollout: router_pb2.GetRolloutResponse) -> Iterator[str]:
    """Line by line."""
    if not rollout.gated:
        yield "router.rollout.gate is off: what stands here is not in force; automatic mode goes by table and guard"
    standing = {f"{one.task}/{one.drafter}" for one in rollout.rollouts}
    heard = sorted({record.subject for record in rollout.audit} - standing)
    if heard:
        yield f"just heard of, takes effect within a second or two: {', '.join(heard)}"
    elif not rollout.rollouts:
        yield "no type of task has passed a check yet (one that shows nothing changes nothing); `paceline check` makes one, `paceline rollout allow` goes without"
    for one in rollout.rollouts:
        bar = "#" * round(_BAR * one.share)
        yield f"{one.task} with {one.drafter}: {one.stage}, {one.share:.0%} speculate  [{bar:<{_BAR}}]"
        yield f"    since {clock(one.since)}: {one.reason}"
        if one.share:
            yield (
                f"    {one.windows} windows passed or failed; in this one {one.window_requests} speculative requests, "
                f"{one.plain_requests} plain to compare with"
            )
    yield "moved:" if rollout.audit else "moved: nothing yet"
    for record in rollout.audit:
        yield f"  {clock(record.at)} {record.subject}: {record.words}"


async def _status(address: str) -> None:
    from paceline.client import Client

    async with Client(address) as client:
        show(status_lines(await client.rollout()))


async def _order(
    address: str,
    action: "router_pb2.RolloutAction.ValueType",
    task: str,
    drafter: str,
    note: str,
    share: float | None = None,
) -> None:
    from paceline.client import Client

    order = router_pb2.RolloutOrder(task=task, drafter=drafter, action=action, note=note, share=share)
    async with Client(address) as client:
        await client.set_rollout([order])
    typer.echo("said; `paceline rollout status` shows it within a second or two")

"""``paceline policy``: what the router decides by, and rules that override it. Imports its client when it is used."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Annotated, Any

import typer

from cluster.options import DEFAULT_ADDRESS, Address
from cluster.words import show
from paceline.errors import PacelineError

Task = Annotated[str, typer.Option(help="Only this type of task.")]
Tenant = Annotated[str, typer.Option(help="Only this tenant.")]
Note = Annotated[str, typer.Option(help="Why, shown wherever the rule is applied.")]


def policy_app(errors: Callable[[], AbstractContextManager[None]]) -> typer.Typer:
    """The sub-commands; ``errors`` turns our errors into words and exit codes."""
    app = typer.Typer(help="What the router decides by, and rules that override it.", no_args_is_help=True)

    def run(work: Coroutine[Any, Any, None]) -> None:
        with errors():
            asyncio.run(work)

    @app.command()
    def show(address: Address = DEFAULT_ADDRESS) -> None:
        """Show rules, guards, the comparison with the holdout, and what was switched."""
        run(_show(address))

    @app.command()
    def plain(
        task: Task = "", tenant: Tenant = "", note: Note = "", address: Address = DEFAULT_ADDRESS
    ) -> None:
        """Decode plainly: a task, a tenant, both, or everything."""
        run(_set(address, "plain", task=task, tenant=tenant, note=note))

    @app.command()
    def speculative(
        task: Task = "",
        tenant: Tenant = "",
        drafter: Annotated[str, typer.Option(help="With this drafter; default: the table's.")] = "",
        k: Annotated[int, typer.Option("--k", min=0, max=64, help="Most draft tokens a round.")] = 0,
        note: Note = "",
        address: Address = DEFAULT_ADDRESS,
    ) -> None:
        """Decode speculatively, whatever the guard says."""
        run(_set(address, "speculative", task=task, tenant=tenant, drafter=drafter, k=k, note=note))

    @app.command()
    def forbid(
        drafter: Annotated[str, typer.Argument(help="The drafter that may not be chosen.")],
        task: Task = "",
        tenant: Tenant = "",
        note: Note = "",
        address: Address = DEFAULT_ADDRESS,
    ) -> None:
        """Never choose a drafter; requests that name it still get it."""
        run(_set(address, "forbid", task=task, tenant=tenant, drafter=drafter, note=note))

    @app.command()
    def clear(
        task: Task = "",
        tenant: Tenant = "",
        drafter: Annotated[str, typer.Option(help="As in the rule.")] = "",
        address: Address = DEFAULT_ADDRESS,
    ) -> None:
        """Take a rule away; its scope must be named as it was set."""
        run(_clear(address, task, tenant, drafter))

    return app


async def _show(address: str) -> None:
    from cluster.policy_words import in_words
    from paceline.client import Client

    async with Client(address) as client:
        show(in_words(await client.policy()))


async def _set(address: str, action: str, **fields: Any) -> None:
    from cluster.policy_words import ACTIONS, rule_in_words
    from paceline.client import Client
    from paceline.v1 import router_pb2

    number = next(number for number, name in ACTIONS.items() if name == action)
    async with Client(address) as client:
        for rule in await client.set_policy_rule(router_pb2.PolicyRule(action=number, **fields)):
            typer.echo(rule_in_words(rule))
        known = {one.name for one in (await client.server_info()).drafters}
        if fields.get("drafter") and fields["drafter"] not in known:
            typer.echo(
                f"note: no drafter is called {fields['drafter']} now; known: {', '.join(sorted(known)) or 'none'}"
            )


async def _clear(address: str, task: str, tenant: str, drafter: str) -> None:
    from paceline.client import Client

    async with Client(address) as client:
        if not await client.remove_policy_rule(task, tenant, drafter):
            raise PacelineError("there is no rule of exactly this scope; see `paceline policy show`")
        typer.echo("removed")

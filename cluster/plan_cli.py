"""``paceline plan``: what a pair would give, before anybody has it."""

import asyncio
import dataclasses
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from cluster.options import write_file
from paceline.errors import ConfigError

_GB, _KB = 1e9, 1e3
_MOST = 1e12  # of whatever unit


def add_plan(app: typer.Typer, errors: Callable[[], AbstractContextManager[None]]) -> None:
    """Adds the command to ``app``; ``errors`` turns our errors into words and exit codes."""

    @app.command()
    def plan(
        acceptance: Annotated[
            str,
            typer.Option(
                "--acceptance",
                "-a",
                help="Chance that a draft token is accepted where those before it were; 0.8, or by position 0.8,0.7,0.6.",
            ),
        ] = "",
        ledger: Annotated[Path | None, typer.Option(help="Take it from a ledger's file instead.")] = None,
        task: Annotated[str, typer.Option(help="With --ledger: only this type of task.")] = "",
        drafter: Annotated[str, typer.Option(help="With --ledger: only this drafter.")] = "",
        pair: Annotated[
            str,
            typer.Option(
                help="Costs of a simulated pair: 8b+1b, 70b+1b or 27b+block; those given here come on top."
            ),
        ] = "8b+1b",
        costs: Annotated[
            str,
            typer.Option(
                metavar="HOST:PORT",
                help="Take the target's step costs from a running verify replica, as `paceline costs` shows.",
            ),
        ] = "",
        draft_ms: Annotated[float | None, typer.Option(min=0, help="One forward of the drafter.")] = None,
        verify_ms: Annotated[
            float | None, typer.Option(min=0.001, help="One step of the target, few rows.")
        ] = None,
        free_rows: Annotated[
            int | None, typer.Option(min=1, help="Rows of a step that cost what one costs.")
        ] = None,
        row_ms: Annotated[float | None, typer.Option(min=0, help="Each further row of a step.")] = None,
        one_pass: Annotated[
            bool, typer.Option("--one-pass", help="The drafter guesses a block in one forward.")
        ] = False,
        shared: Annotated[bool, typer.Option("--shared", help="Drafter and target on one device.")] = False,
        rtt_ms: Annotated[float, typer.Option(min=0, help="Round trip between the two.")] = 0.0,
        overhead_ms: Annotated[float, typer.Option(min=0, help="Of every step, beside its forward.")] = 0.0,
        sequences: Annotated[
            int, typer.Option("--sequences", "-n", min=1, help="Sequences at the same time.")
        ] = 1,
        context: Annotated[int, typer.Option(min=0, help="Tokens of each.")] = 0,
        max_k: Annotated[int, typer.Option(min=1, max=64, help="Largest k to reckon.")] = 8,
        device_gb: Annotated[
            float, typer.Option(min=0, help="Memory of the device, in 10^9 bytes; 0: leave capacity out.")
        ] = 0.0,
        target_gb: Annotated[float, typer.Option(min=0, help="Weights of the target.")] = 0.0,
        target_kv_kb: Annotated[
            float, typer.Option(min=0, help="KV of a token in the target, in 10^3 bytes.")
        ] = 0.0,
        draft_gb: Annotated[float, typer.Option(min=0, help="Weights of the drafter.")] = 0.0,
        draft_kv_kb: Annotated[float, typer.Option(min=0, help="KV of a token in the drafter.")] = 0.0,
        price: Annotated[
            float, typer.Option(min=0, help="Of an hour of the hardware, in any currency.")
        ] = 0.0,
        plot: Annotated[Path | None, typer.Option(help="Draw speed over k into this file, as SVG.")] = None,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print everything as one line of JSON instead.")
        ] = False,
    ) -> None:
        """Reckon what speculation would give: speed by k, break-even, draft-ahead, capacity, cost."""
        with errors():
            from cluster.plan_words import plan_lines, plan_picture
            from gates.capacity import Memory
            from gates.plan import Scenario
            from gates.plan import plan as reckoned
            from paceline.simulation import PAIRS

            _check_finite(
                {
                    "--draft-ms": draft_ms, "--verify-ms": verify_ms, "--row-ms": row_ms, "--rtt-ms": rtt_ms,
                    "--overhead-ms": overhead_ms, "--device-gb": device_gb, "--target-gb": target_gb,
                    "--target-kv-kb": target_kv_kb, "--draft-gb": draft_gb, "--draft-kv-kb": draft_kv_kb, "--price": price,
                }
            )  # fmt: skip
            if pair not in PAIRS:
                raise ConfigError(f"--pair {pair}: expected one of {', '.join(sorted(PAIRS))}")
            known = PAIRS[pair]
            # A cost of one's own has no growth of somebody else's: rows and context are free unless said.
            own = verify_ms is not None
            verify = dataclasses.replace(
                known.verify,
                base_s=known.verify.base_s if verify_ms is None else 1e-3 * verify_ms,
                free_rows=free_rows or known.verify.free_rows,
                row_s=1e-3 * row_ms
                if row_ms is not None
                else 0.0
                if own and free_rows is None
                else known.verify.row_s,
                context_s=0.0 if own else known.verify.context_s,
            )
            measured = None
            if costs:
                from cluster.cost_table import cost_table

                if own or free_rows or row_ms is not None:
                    raise ConfigError(
                        "--costs tells what a step costs: leave out --verify-ms, --free-rows and --row-ms"
                    )
                measured = asyncio.run(cost_table(costs))
            draft = known.draft
            if draft_ms is not None:
                draft = dataclasses.replace(draft, base_s=1e-3 * draft_ms, row_s=0.0, context_s=0.0)
            memory = None
            if device_gb:
                sizes = (
                    device_gb * _GB,
                    target_gb * _GB,
                    target_kv_kb * _KB,
                    draft_gb * _GB,
                    draft_kv_kb * _KB,
                )
                memory = Memory(*sizes)
                if not context or not target_kv_kb:
                    raise ConfigError("--device-gb: capacity needs --context and --target-kv-kb as well")
            answer = reckoned(
                Scenario(
                    acceptance=_acceptance(acceptance, ledger, task, drafter),
                    verify=measured or verify,
                    draft=draft,
                    one_pass=one_pass or (known.one_pass and draft_ms is None),
                    rtt_s=1e-3 * rtt_ms,
                    overhead_s=1e-3 * overhead_ms,
                    sequences=sequences,
                    context=context,
                    max_k=max_k,
                    shared=shared,
                    memory=memory,
                    price_per_hour=price,
                )
            )
            if plot is not None:
                write_file(plot, plan_picture(answer))
            if as_json:
                typer.echo(json.dumps(dataclasses.asdict(answer)))
                return
            for line in (*_taken_over(pair, verify_ms, draft_ms, costs), *plan_lines(answer)):
                typer.echo(line)
            if plot is not None:
                typer.echo(f"Drawn into {plot}.")


def _taken_over(pair: str, verify_ms: float | None, draft_ms: float | None, costs: str) -> Iterator[str]:
    """What nobody said and the pair's table says instead."""
    from paceline.simulation import PAIRS

    known, said = PAIRS[pair], []
    if verify_ms is None and not costs:
        said.append(f"a target's step of {1e3 * known.verify.base_s:g} ms (--verify-ms or --costs)")
    if draft_ms is None:
        said.append(f"a draft forward of {1e3 * known.draft.base_s:g} ms (--draft-ms)")
    if said:
        words = f"Not given, so taken from the pair {pair}: {', '.join(said)}."
        yield from textwrap.wrap(words, 80)


def _check_finite(options: Mapping[str, float | None]) -> None:
    """Raises ConfigError: with what is endless, or nearly so, nothing can be reckoned."""
    for name, value in options.items():
        if value is not None and not value <= _MOST:
            raise ConfigError(f"{name} {value:g}: expected a number up to {_MOST:g}")


def _acceptance(given: str, ledger: Path | None, task: str, drafter: str) -> tuple[float, ...]:
    """By position. Raises ConfigError."""
    if bool(given) == (ledger is not None):
        raise ConfigError("give either --acceptance or --ledger")
    if ledger is None and (task or drafter):
        raise ConfigError("--task and --drafter choose from a ledger: they need --ledger, not --acceptance")
    if ledger is None:
        try:
            rates = tuple(float(part) for part in given.split(","))
        except ValueError:
            rates = ()
        if not rates or not all(0 <= rate <= 1 for rate in rates):
            raise ConfigError(f"--acceptance {given!r}: expected numbers from 0 to 1, separated by commas")
        return rates
    from cluster.ledger_file import read_ledger
    from router.policy import prior_from

    row = read_ledger(ledger).total(
        lambda group: (
            bool(group.drafter)
            and (not task or group.task == task)
            and (not drafter or group.drafter == drafter)
        )
    )
    prior = prior_from(row)
    if prior is None:
        raise ConfigError(f"{ledger}: too few rounds with a draft of that kind to know their acceptance")
    return prior.by_position

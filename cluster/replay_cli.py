"""``paceline replay``: recorded traffic under other drafters, other k, and the controller. Imports torch's side when used."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

CONTROLLER = "verify_service.controller"


def replay_command(errors: Callable[[], AbstractContextManager[None]]) -> Callable[..., None]:
    """The command; ``errors`` turns our errors into words and exit codes."""

    def replay(
        files: Annotated[
            list[Path], typer.Argument(help="Files, or directories of them, that verify.records.dir names.")
        ],
        drafter: Annotated[
            list[str] | None,
            typer.Option("--drafter", "-d", help="A drafter; may be given again. Default: all."),
        ] = None,
        k: Annotated[
            list[int] | None,
            typer.Option("--k", "-k", min=1, max=64, help="Draft tokens a round; may be given again."),
        ] = None,
        adaptive: Annotated[
            bool,
            typer.Option(
                "--adaptive", help="Also with up to k a round, as the controller would have chosen."
            ),
        ] = False,
        policy: Annotated[
            list[str] | None,
            typer.Option(metavar="MODULE:NAME", help="Also by a policy of your own, with decide and trim."),
        ] = None,
        config: Annotated[
            Path | None,
            typer.Option("--config", "-c", help="Settings of the draft tier, TOML; default: built in."),
        ] = None,
        overrides: Annotated[
            list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting.")
        ] = None,
        as_json: Annotated[
            bool, typer.Option("--json", help="One line of JSON instead of the table.")
        ] = False,
    ) -> None:
        """Show what other drafters or another k would have done on recorded requests, without the target model."""
        with errors():
            from evaluation import replay_table
            from evaluation.recordings import load_recording
            from paceline.config import load_config

            recording = load_recording(files)
            settings = load_config(config, [f"model.name={json.dumps(recording.model)}", *(overrides or ())])
            names = drafter or list(settings.draft.drafters)
            policies = {"controller": replay_table.policy_at(CONTROLLER)} if adaptive else {}
            policies |= {path: replay_table.policy_at(path) for path in policy or ()}
            rows = []
            for row in replay_table.compare(recording, settings, names, k or [4], policies):
                rows.append(row)
                typer.echo(f"{row.name}: done", err=True)
            if as_json:
                typer.echo(json.dumps(replay_table.as_json(recording, rows)))
                return
            for line in (*replay_table.table(rows), *replay_table.notes(recording)):
                typer.echo(line)

    return replay

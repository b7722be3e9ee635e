"""``paceline diagnose``: which known troubles a ledger or recorded requests show."""

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from gates.evidence import Evidence


def add_diagnose(app: typer.Typer, errors: Callable[[], AbstractContextManager[None]]) -> None:
    """Adds the command to ``app``; ``errors`` turns our errors into words and exit codes."""

    @app.command()
    def diagnose(
        ledger: Annotated[
            Path | None, typer.Option(help="A ledger's file; `paceline policy show` names it.")
        ] = None,
        records: Annotated[
            Path | None,
            typer.Option(
                help="Requests, one JSON object a line, as `generate --json`, `check` and verify.records write them; of a "
                "directory all that verify.records wrote there."
            ),
        ] = None,
        offline: Annotated[
            list[str] | None,
            typer.Option(
                metavar="[DRAFTER=]SHARE", help="Accepted share that was measured offline; repeat for more."
            ),
        ] = None,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print the findings as one line of JSON.")
        ] = False,
    ) -> None:
        """Name the known troubles that a ledger or recorded requests show, with evidence and remedy."""
        with errors():
            from cluster.diagnose_words import diagnosis_lines
            from gates.diagnose import diagnose as examined

            found = examined(evidence_of(ledger, records, _shares(offline or [])))
            if as_json:
                typer.echo(
                    json.dumps(
                        [
                            {
                                "trouble": f.trouble.name.lower(),
                                "words": f.trouble.value,
                                "task": f.task,
                                "evidence": f.evidence,
                                "remedy": f.remedy,
                            }
                            for f in found.findings
                        ]
                    )
                )
                return
            for line in diagnosis_lines(found):
                typer.echo(line)


def evidence_of(ledger: Path | None, records: Path | None, offline: dict[str, float]) -> "Evidence":
    """What the ledger, or the records, hold. Raises ConfigError."""
    from gates.evidence import from_rows, together

    if ledger is not None and records is None:
        from cluster.ledger_file import read_ledger

        found = read_ledger(ledger)
        rows = ((cell.group, float(cell.start), row) for cell, row in found.rows)
        return from_rows(rows, found.documents.get("holdout", "[]"), offline)
    if records is not None and ledger is None:
        files = sorted(records.glob("requests-*.jsonl")) if records.is_dir() else [records]
        if not files:
            raise ConfigError(f"{records}: no file there that verify.records wrote (requests-*.jsonl)")
        return together([_from_file(file, offline) for file in files], offline)
    raise ConfigError("give either --ledger or --records")


def _from_file(file: Path, offline: dict[str, float]) -> "Evidence":
    from gates.evidence import from_records

    try:
        with file.open(encoding="utf-8") as lines:
            return from_records(lines, offline)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error


def _shares(given: list[str]) -> dict[str, float]:
    shares = {}
    for one in given:
        name, _, number = one.rpartition("=")
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            raise ConfigError(f"--offline {one!r}: expected a share from 0 to 1, or drafter=share")
        shares[name] = share
    return shares

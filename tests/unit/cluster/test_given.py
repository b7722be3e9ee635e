"""A command line said again."""

from pathlib import Path
from typing import Annotated

import typer
from typer.testing import CliRunner

from cluster.options import given

app = typer.Typer()
found: list[list[str]] = []


@app.command()
def check(
    context: typer.Context,
    traffic: Path,
    load: Annotated[int, typer.Option()] = 1,
    task: Annotated[list[str] | None, typer.Option()] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set")] = None,
    record: Annotated[bool, typer.Option("--record/--no-record")] = True,
) -> None:
    found.append(given(context, but=frozenset({"task"})))


def said(*words):
    assert CliRunner().invoke(app, words, prog_name="check").exit_code == 0
    return found.pop()


def test_only_what_was_given_is_said_again():
    """Defaults are left out, what stands in ``but`` too; options that repeat do."""
    assert said("a b.jsonl") == ["check", "a b.jsonl"]
    assert said("a", "--load", "4", "--task", "code", "--no-record") == [
        "check",
        "a",
        "--load",
        "4",
        "--no-record",
    ]
    assert said("a", "--set", "x=1", "--set", "y=2") == ["check", "a", "--set", "x=1", "--set", "y=2"]


def test_a_file_called_like_an_option_is_a_file():
    """Said so that it can be typed anywhere in a command."""
    assert said("--load", "4", "--", "-odd.jsonl") == ["check", "./-odd.jsonl", "--load", "4"]

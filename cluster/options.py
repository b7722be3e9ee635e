"""Options that several commands have, and files that several write."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1:7440"
DEFAULT_VERIFY_ADDRESS = "127.0.0.1:7441"

Address = Annotated[
    str, typer.Option("--address", "-a", envvar="PACELINE_ADDRESS", help="host:port of the router.")
]


def beside(router: str) -> str:
    """Where the verify replica of a router usually listens: its port on the router's host."""
    return f"{router.rpartition(':')[0]}:{DEFAULT_VERIFY_ADDRESS.rpartition(':')[2]}"


def write_file(path: Path, text: str, *, private: bool = False) -> None:
    """``private``: for the owner alone. Raises ConfigError where it cannot be written."""
    try:
        if private:  # before anything is in it
            path.touch(mode=0o600)
            path.chmod(0o600)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def given(context: typer.Context, *, but: frozenset[str]) -> list[str]:
    """The words of a command line that were given, without the options named ``but``: what to type for the same again."""
    words = context.command_path.split()
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.name in but or value is None or value == option.get_default(context):
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, bool):
                words.append((option.opts if one else option.secondary_opts)[0])
            else:
                is_option = option.param_type_name == "option"
                word = f"./{one}" if isinstance(one, Path) and str(one).startswith("-") else str(one)
                words += [option.opts[0], word] if is_option else [word]
    return words

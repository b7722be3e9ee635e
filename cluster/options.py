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


def write_file(path: Path, text: str, *, private: bool = False) -> None:
    """``private``: for the owner alone. Raises ConfigError where it cannot be written."""
    try:
        if private:  # before anything is in it
            path.touch(mode=0o600)
            path.chmod(0o600)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error

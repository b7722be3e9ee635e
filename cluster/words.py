"""Small words that several commands say."""

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Iterable

import typer


def show(lines: Iterable[str], *, err: bool = False) -> None:
    """Print them: on a terminal broken between words where it ends, elsewhere (a file, a pipe) as they are."""
    stream, width = sys.stderr if err else sys.stdout, 0
    if stream.isatty():
        with contextlib.suppress(OSError):
            width = os.get_terminal_size(stream.fileno()).columns
    for line in lines:
        for part in broken(line, width):
            typer.echo(part, err=err)


def broken(line: str, width: int) -> list[str]:
    """The line in parts of at most ``width``, those behind the first one indented by four more; whole where that is 0."""
    if len(line) <= width or not width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(
        line,
        max(width, 2 * len(indent)),
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def counted(number: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def clock(at: float) -> str:
    """A unix time as people here write it; 0 is the start."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "the start"


def lasting(seconds: float) -> str:
    """A time as somebody who waits wants to hear it."""
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"

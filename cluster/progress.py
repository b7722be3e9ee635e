"""Says what is being waited for, and for how long: a spinner on a terminal, now and then a line elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

Progress = Callable[[str], None]
"""Told what is waited for, as often as one likes; "" when the wait is over."""

REPEAT_S = 15.0
"""Without a terminal: a line again after so long, though nothing has changed."""


@contextlib.contextmanager
def progress_on(console: Console) -> Iterator[Progress]:
    """Shows what it is told, with the time each step takes so far (terminal) or since the start (lines)."""
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        bar = Bar(*columns, console=console, transient=True)
        try:
            yield _spinner(bar)
        finally:
            bar.stop()
    else:
        yield _lines(console)


def _spinner(bar: Bar) -> Progress:
    task: TaskID | None = None
    said = ""

    def say(text: str) -> None:
        nonlocal task, said
        if text == said:
            return
        if task is not None:
            bar.remove_task(task)
        task = bar.add_task(text, total=None) if text else None
        said = text
        if text:
            bar.start()
        else:
            bar.stop()  # it would redraw itself between pieces of streamed text

    return say


def _lines(console: Console) -> Progress:
    started = time.monotonic()
    said, said_at = "", started

    def say(text: str) -> None:
        nonlocal said, said_at
        now = time.monotonic()
        if text and (text != said or now - said_at >= REPEAT_S):
            still = "still " if text == said else ""
            console.print(f"[{now - started:5.1f} s] {still}{text}", markup=False, soft_wrap=True)
            said_at = now
        said = text or said

    return say

"""The calls that a server is working on, so that a drain can wait for them and then cut them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Call:
    """One call. ``cut`` says that a drain cancelled it, not its client."""

    __slots__ = ("cut", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.cut = False


class InFlight:
    """Owner of the calls in flight. Lives on the event loop."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def call(self, task: asyncio.Task[Any]) -> Iterator[Call]:
        """``task`` works on a call until the block ends."""
        call = Call(task)
        self._calls.add(call)
        self._idle.clear()
        try:
            yield call
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Until no call is in flight."""
        await self._idle.wait()

    def cut(self) -> int:
        """Cancel every call, marked as cut; gives their number."""
        for call in self._calls:
            call.cut = True
            call.task.cancel()
        return len(self._calls)

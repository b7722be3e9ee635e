"""From the engine's thread to the event loop, without giving the interpreter up.

``loop.call_soon_threadsafe`` writes to a socket and lets the interpreter go meanwhile. The loop's thread takes it, and keeps it until all
messages of the step are written: so long the engine, which could be in its next forward, stands still (docs/log.md, "The engine no longer
waits for its own messages"). Here the same byte is written while the interpreter is kept; the loop has its turn when the forward lets it go.
"""

import asyncio
import contextlib
import ctypes
import os
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

_ONE = struct.pack("=Q", 1)


class Handover:
    """``give`` on one thread, ``take`` is called on the loop's, in the same order. ``close`` it on the first one.

    Until it is opened it hands over as the loop itself does.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[Any], None]) -> None:
        self._loop = loop
        self._take = take
        self._given: deque[Any] = deque()
        self._write = _write_kept()
        self._descriptor: int | None = None

    def open(self) -> None:
        """On the loop's thread."""
        if self._write is not None:
            self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._loop.add_reader(self._descriptor, self._woken)

    def give(self, item: Any) -> None:
        """Hand ``item`` over and go on."""
        if self._descriptor is None or self._write is None:
            self._loop.call_soon_threadsafe(self._take, item)
            return
        self._given.append(item)
        self._write(self._descriptor, _ONE, len(_ONE))

    def close(self) -> None:
        """What was given is taken all the same."""
        if self._descriptor is not None:
            self._loop.call_soon_threadsafe(self._closed, self._descriptor)

    def _woken(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._descriptor)
        while self._given:
            # A callback each, so that one that raises is the loop's to report and ends nothing.
            self._loop.call_soon(self._take, self._given.popleft())

    def _closed(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        self._descriptor = None
        self._woken()
        os.close(descriptor)


def _write_kept() -> Callable[[int, bytes, int], int] | None:
    """The system's ``write`` with the interpreter kept, which takes a microsecond or two; None where there are no event descriptors."""
    if not hasattr(os, "eventfd"):
        return None
    write = ctypes.PyDLL(None).write
    write.argtypes, write.restype = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t], ctypes.c_ssize_t
    return write
